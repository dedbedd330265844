"""`kvferry bench`: measurements of this machine, side by side, as medians and ratios."""

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

import kvferry
from kvferry.cli import options, output
from kvferry.clock import Clock, SystemClock

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Argument(help="Where to write; on the disk to be measured. Default: a temporary folder."),
]


@app.command()
def scheduler(
    folder: Folder = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 256,
    steps: Annotated[int, typer.Option(min=100, help="Steps to measure.")] = 1000,
    as_json: options.AsJson = False,
) -> None:
    """What kvferry costs on the thread of vLLM's scheduler."""
    from kvferry.cli import bench_scheduler  # noqa: PLC0415 - needs the native extension

    with TemporaryDirectory(dir=folder) as scratch:
        result = bench_scheduler.run(Path(scratch), requests, steps)
    show({**machine(SystemClock()), **result}, as_json=as_json)


def machine(clock: Clock) -> dict[str, Any]:
    """What any number needs beside it: where and when it was measured."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": " ".join(["kvferry", *sys.argv[1:]]),
        "date": datetime.fromtimestamp(clock.wall_s(), UTC).isoformat(timespec="minutes"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory_bytes >> 30,
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvferry": kvferry.__version__,
    }


def show(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Nested results as one line for each value."""
    if as_json:
        output.print_json(result)
    else:
        output.print_table(("what", "value"), list(lines(result)))


def lines(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names joined by blanks, values as text."""
    found = []
    for name, value in result.items():
        if isinstance(value, Mapping):
            found += lines(value, f"{prefix}{name} ")
        else:
            found.append((prefix + name, str(value)))
    return found
