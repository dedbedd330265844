"""`kvferry check`: reads every page of a store and reports, or drops, what is not good."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from kvferry.catalog.base import Catalog
from kvferry.catalog.snapshot import check_invariants, excess_bytes
from kvferry.cli import options, output, verification
from kvferry.cli.opened import OpenedStore, open_store
from kvferry.cli.verification import Verdict
from kvferry.errors import CorruptError
from kvferry.offload.worker.load_jobs import BAD_PAGE
from kvferry.pages.base import Outcome


class BadPage(msgspec.Struct, frozen=True):
    """One page that is not what it should be. Digests in hexadecimal."""

    namespace: str
    key: str
    segment: int
    slot: int
    outcome: str


class CheckReport(msgspec.Struct, frozen=True):
    """What `check` found. `contradictions`: what the catalog says that cannot all be true.
    `excess_bytes`: what the segments take beyond the capacity, as after a `resize`."""

    checked_count: int
    bad: list[BadPage]
    dropped_count: int
    contradictions: list[str]
    has_catalog: bool
    excess_bytes: int = 0

    @property
    def is_clean(self) -> bool:
        return not self.bad and not self.contradictions


def check(
    pages: options.Pages,
    catalog: options.CatalogUrl = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Drop bad pages from the catalog: they become misses. Not those that cannot be"
            " read just now (io_error).",
        ),
    ] = False,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Read every page of a store, payloads included, and verify it. May run beside engines."""
    with open_store(options.store_config(pages, catalog, usrbio_library)) as store:
        report = examine(store, fix=fix)
    if as_json:
        output.print_json(report)
    else:
        _print(report)
    if not report.is_clean:
        raise typer.Exit(output.WRONG)


def examine(store: OpenedStore, *, fix: bool) -> CheckReport:
    """Verifies what the catalog promises; without a catalog, what the store itself holds."""
    contradictions: list[str] = []
    excess = 0
    if store.catalog is None:
        promises = list(verification.found(store.pages))
    else:
        try:
            snapshot = store.catalog.snapshot()
        except CorruptError as error:
            return CheckReport(0, [], 0, [str(error)], has_catalog=True)
        contradictions = check_invariants(snapshot)
        excess = excess_bytes(snapshot)
        promises = verification.promised(snapshot, store.pages.segments())
    bad = _still_promised(store, _bad(store, promises))
    dropped_count = drop(store.catalog, bad) if fix and store.catalog is not None else 0
    return CheckReport(
        len(promises),
        [_describe(verdict) for verdict in bad],
        dropped_count,
        contradictions,
        store.catalog is not None,
        excess,
    )


def drop(catalog: Catalog, bad: Sequence[Verdict]) -> int:
    """Evicts exactly these generations, but for those that may be readable again. Returns how many
    were still there."""
    by_namespace = defaultdict(list)
    for promise in (promise for promise, outcome in bad if outcome in BAD_PAGE):
        by_namespace[promise.page.namespace].append((promise.page.key, promise.page.generation))
    return sum(catalog.evict(namespace, pages) for namespace, pages in by_namespace.items())


def _bad(store: OpenedStore, promises: Sequence[verification.Promise]) -> list[Verdict]:
    with output.progress() as progress:
        task = progress.add_task("reading pages", total=len(promises))
        bad = []
        for verdict in verification.verify(store.pages, promises):
            progress.advance(task)
            if verdict.outcome is not Outcome.OK:
                bad.append(verdict)
    return bad


def _still_promised(store: OpenedStore, bad: Sequence[Verdict]) -> list[Verdict]:
    """Without pages that were evicted while others were read: their slots may hold others now."""
    if store.catalog is None or not bad:
        return list(bad)
    pages = store.catalog.snapshot().pages
    now = {name: (page.generation, page.address) for name, page in pages.items()}
    return [
        verdict
        for verdict in bad
        for page in [verdict.promise.page]
        if now.get((page.namespace, page.key)) == (page.generation, verdict.promise.address)
    ]


def _describe(verdict: Verdict) -> BadPage:
    page, _, address = verdict.promise
    return BadPage(
        page.namespace.hex(), page.key.hex(), address.segment, address.slot, verdict.outcome.value
    )


def _print(report: CheckReport) -> None:
    if not report.has_catalog:
        print("There is no catalog here; what lies on the store was read.")
    print(f"{report.checked_count} pages read, {len(report.bad)} of them bad")
    for outcome, count in Counter(page.outcome for page in report.bad).items():
        print(f"  {outcome}: {count}")
    for words in report.contradictions:
        print(f"  catalog: {words}")
    if report.excess_bytes:
        print(
            f"{output.size_text(report.excess_bytes)} too much, as after a resize to less: the next"
            " engine that starts evicts it"
        )
    if report.bad and report.dropped_count:
        print(f"{report.dropped_count} dropped from the catalog: they are misses now")
    elif report.bad and report.has_catalog:
        print("They are misses when they are read; --fix drops them now, but for those of io_error")
