"""A Valkey server for tests, and a catalog on it whose time is the test's.

The rules run as they do in use; only the part of the library that asks for the time is another:
`ClockedLink` says what time it is before each call.
"""

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.catalog.base import DEFAULT_POLICY, GRACE_S, Policy
from kvferry.catalog.valkey import ValkeyCatalog
from kvferry.catalog.valkey_library import library
from kvferry.catalog.valkey_link import Link
from kvferry.catalog.valkey_server import OwnServer, free_port
from kvferry.clock import Clock, SystemClock
from kvferry.server_url import ServerUrl, is_loopback

UNHURRIED_S = 60.0
NOW_KEY = "kvferry:test:now_s"
CLOCK_RULES = f"""
local function server_now_s()
  return tonumber(redis.call('GET', '{NOW_KEY}'))
end
"""


class ClockedLink(Link):
    """A link to a server on which `clock` is the time. What it answers must not depend on how
    busy the machine is, so it waits."""

    def __init__(self, server: ServerUrl, clock: Clock):
        super().__init__(server, SystemClock(), library(CLOCK_RULES), UNHURRIED_S)
        self._time = clock

    def call(self, function: str, root: bytes, *arguments: Any) -> Any:
        self.say("SET", NOW_KEY, repr(self._time.now_s()))
        return super().call(function, root, *arguments)


def clocked_catalog(
    server: ServerUrl,
    clock: Clock,
    grace_s: float = GRACE_S,
    policy: Policy = DEFAULT_POLICY,
) -> ValkeyCatalog:
    """A catalog that tells the time of `clock`."""
    return ValkeyCatalog(server, clock, grace_s, link=ClockedLink(server, clock), policy=policy)


class ServerProcess(OwnServer):
    """A server on a free port, over a folder of its own. `start` again after `kill` is a restart
    with what its file has. `host`: an address of this machine, where it asks for a password."""

    def __init__(self, folder: Path, *options: str, host: str = "127.0.0.1"):
        password = None if is_loopback(host) else "secret"
        url = ServerUrl(host, free_port(), 0, False, None, password, None)
        super().__init__(folder, url, SystemClock(), options)

    def url_of(self, user: str | None = None, password: str | None = None) -> ServerUrl:
        """Its URL for a user."""
        return replace(self.url, user=user, password=password)

    def say(self, *command: Any) -> Any:
        """One command, on a connection of its own."""
        link = Link(self.url, SystemClock(), library())
        link.open()
        try:
            return link.say(*command)
        finally:
            link.close()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Leaves it no time for anything, stopped or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """What it wrote is gone: the next start begins with nothing. Not while it runs."""
        shutil.rmtree(self.folder)
