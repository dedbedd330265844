"""Hosts of one machine: network namespaces behind one bridge. Needs root and iproute2."""

import os
import shutil
import subprocess

BRIDGE = "kvferry0"
HOME = "10.77.77.1"
"""The address of this machine on the bridge."""


def can_make() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = subprocess.run(
        ["ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True, check=False
    )
    _ip("link", "del", BRIDGE, check=False)
    return probe.returncode == 0


class Hosts:
    """`names` from `make` to `remove`. All files are everybody's."""

    def __init__(self, *names: str):
        self._names = names

    def make(self) -> None:
        self.remove()
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{HOME}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(self._names, start=2):
            _ip("netns", "add", name)
            _ip("link", "add", _near(name), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", _near(name), "master", BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{HOME[:-1]}{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        for name in self._names:
            _ip("netns", "del", name, check=False)
            _ip("link", "del", _near(name), check=False)
        _ip("link", "del", BRIDGE, check=False)

    def cut(self, name: str) -> None:
        """Nothing that it sends arrives, and nobody tells it so."""
        _ip("link", "set", _near(name), "down")

    def join(self, name: str) -> None:
        _ip("link", "set", _near(name), "up")


def inside(name: str) -> list[str]:
    """What stands before a command that runs on this host."""
    return ["ip", "netns", "exec", name]


def _near(name: str) -> str:
    return f"{name}-near"


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], capture_output=not check, check=check)
