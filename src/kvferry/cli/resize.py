"""`kvferry resize`: gives a store another capacity."""

import shutil
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvferry.cli import options, output
from kvferry.cli.opened import existing_root
from kvferry.clock import SystemClock
from kvferry.errors import IncompatibleError
from kvferry.pages import segments
from kvferry.pages.owner import OWNER_LEASE_S, StoreOwnership
from kvferry.setting_values import parse_size


class ResizeReport(msgspec.Struct, frozen=True):
    """What was done. `room_bytes`: what the disk has for the store, free or taken by it."""

    store_id: str
    capacity_bytes_before: int
    capacity_bytes: int
    room_bytes: int


def resize(
    pages: options.Pages,
    capacity: Annotated[str, typer.Argument(help='Bytes, or a size such as "200GiB".')],
    force: Annotated[
        bool, typer.Option("--force", help="Although an engine may use the store: do not look.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Change the capacity of a store while no engine uses it; after one was killed it takes some
    seconds to be sure. Smaller: what is too much is evicted when an engine starts. The
    configuration must then agree, or leave capacity out."""
    capacity_bytes = parse_size("capacity", capacity)
    root, superblock = existing_root(options.store_config(pages))
    clock = SystemClock()
    user = None if force else StoreOwnership(root, "", clock).user(OWNER_LEASE_S)
    if user is not None:
        raise IncompatibleError(
            "cli.in_use",
            f"an engine on {user.host} uses the store: stop it first",
        )
    facts = segments.resize(root, capacity_bytes, clock)
    report = ResizeReport(
        facts.store_id.hex(), superblock.capacity_bytes, facts.capacity_bytes, _room_bytes(root)
    )
    if report.capacity_bytes > report.room_bytes:
        output.complain(
            f"kvferry: the disk has {output.size_text(report.room_bytes)} for the store, that is"
            " less: free space, or resize again. Stores would stop when it is full"
        )
    if as_json:
        output.print_json(report)
    else:
        before, after = report.capacity_bytes_before, report.capacity_bytes
        print(f"capacity: {output.size_text(before)} -> {output.size_text(after)}")


def _room_bytes(root: Path) -> int:
    taken_bytes = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    return shutil.disk_usage(root).free + taken_bytes
