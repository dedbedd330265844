"""`kvferry catalog rebuild`: fills a catalog from what the pages say of themselves.

Engines do that by themselves when they find their catalog lost. This does it before they start, or
beside them, and says how far it is.
"""

from pathlib import Path

import msgspec

from kvferry.cli import options, output
from kvferry.cli.opened import OpenedStore, existing_root, open_store
from kvferry.clock import Clock, SystemClock
from kvferry.errors import IncompatibleError
from kvferry.metrics import Metrics
from kvferry.offload.space.recovery import Recovered, recover
from kvferry.pages.owner import OWNER_LEASE_S, StoreOwnership


class RebuildReport(msgspec.Struct, frozen=True):
    """Segments of the store: known before, taken over, deleted since the budget has no room for
    them; segments that the catalog knew and that are gone; pages that were taken over."""

    catalog: str
    known_segments: int
    adopted_segments: int
    deleted_segments: int
    forgotten_segments: int
    adopted_pages: int


def rebuild(
    pages: options.Pages,
    catalog: options.CatalogUrl = None,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Fill a catalog from the headers of the pages, as after it was lost. May run beside engines
    that use the same catalog; what it knows already is left as it is."""
    config = options.store_config(pages, catalog, usrbio_library)
    root, _ = existing_root(config)
    with open_store(config, may_make=True) as store:
        refuse_rival(root, store.catalog.catalog_id, SystemClock())
        report = examine(store)
    if as_json:
        output.print_json(report)
        return
    print(f"catalog: {report.catalog}")
    print(
        f"{report.adopted_pages} pages in {report.adopted_segments} segments taken over;"
        f" {report.known_segments} segments were known"
    )
    if report.deleted_segments:
        print(f"{report.deleted_segments} segments deleted: the capacity has no room for them")
    if report.forgotten_segments:
        print(f"{report.forgotten_segments} segments forgotten: their files are gone")


def refuse_rival(root: Path, catalog_id: bytes, clock: Clock) -> None:
    """Raises IncompatibleError if engines use the store with another catalog: that one gives out
    the slots, and its segments would be taken from it."""
    user = StoreOwnership(root, "", clock).user(OWNER_LEASE_S)
    if user is not None and user.catalog_id != catalog_id.hex():
        raise IncompatibleError(
            "cli.in_use", f"an engine on {user.host} uses the store with another catalog: name that"
        )


def examine(store: OpenedStore) -> RebuildReport:
    """Fills the catalog of an opened store."""
    with output.progress() as progress:
        task = progress.add_task("reading segments", total=None)

        def on_segment(done_count: int, count: int) -> None:
            progress.update(task, completed=done_count, total=count)

        recovered: Recovered = recover(
            store.catalog, store.pages, store.facts, Metrics(), on_segment
        )
    return RebuildReport(
        store.catalog_url,
        recovered.known_count,
        recovered.adopted_count,
        recovered.deleted_count,
        recovered.forgotten_count,
        recovered.page_count,
    )
