"""How commands speak: tables for people, JSON for scripts, progress on standard error."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvferry.errors import ConfigError, Error, IncompatibleError, InternalError, UnavailableError

OK = 0
WRONG = 1
USAGE = 2
UNREACHABLE = 3
BUG = 70

GIB = 1 << 30
PIPE_COLUMNS = 200
"""Where no terminal says how wide it is, nothing is cut off."""


def exit_code(error: Error) -> int:
    """What a script can rely on: docs/operations.md."""
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, UnavailableError | IncompatibleError):
        return UNREACHABLE
    return BUG if isinstance(error, InternalError) else WRONG


def print_json(value: Any) -> None:
    """One JSON document on standard output. Bytes become hex."""
    text = msgspec.json.encode(value, enc_hook=str)
    print(msgspec.json.format(text, indent=2).decode())


def open_console(*, stderr: bool = False) -> Console:
    """Where a command speaks to people."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """A table on standard output; all but the first column are aligned to the right."""
    table = Table(title=title or None, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    open_console().print(table)


def progress() -> Progress:
    """A progress bar on standard error, gone when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def complain(message: str) -> None:
    """A line on standard error, without markup."""
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


def size_text(size_bytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size_bytes) < 1024 or unit == "PiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise InternalError("cli.size", "no unit is large enough")
