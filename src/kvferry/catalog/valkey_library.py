"""The rules of the catalog as a library of functions that a Valkey server runs.

Its name says what it is a library of, so that engines of two versions each find their own on one
server. `clock`: the part that says what time it is.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FORMAT_VERSION = 3
"""Of the records. 1: the first. 2: uses of pages, ghosts; ages in steps of 10 s. 3: shares and
quotas."""

_FOLDER = Path(__file__).with_name("valkey_rules")
_PARTS = (
    "tables",
    "book",
    "shares",
    "quotas",
    "verbs",
    "eviction",
    "sweeping",
    "figures",
    "functions",
)
_NAME = "@LIBRARY@"


@dataclass(frozen=True, slots=True)
class Library:
    """`source`: what `FUNCTION LOAD` takes. Functions are named `<name>_<verb>`."""

    name: str
    source: str


def library(clock: str | None = None) -> Library:
    """The library of this version of kvferry. `clock`: Lua for another time than the server's."""
    parts = [clock if clock is not None else _part("clock"), *map(_part, _PARTS)]
    body = "\n".join(parts)
    digest = hashlib.sha256(body.encode()).hexdigest()[:8]
    name = f"kvferry_v{FORMAT_VERSION}_{digest}"
    return Library(name, f"#!lua name={name}\n" + body.replace(_NAME, name))


def _part(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text()
