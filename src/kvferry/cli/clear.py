"""`kvferry clear`: removes what a store holds, of one namespace or of all."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from kvferry.cli import options, output
from kvferry.cli.catalog_rebuild import refuse_rival
from kvferry.cli.opened import OpenedStore, existing_root, open_store
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, UnavailableError
from kvferry.pages.base import PageStore

PREFIX_DIGITS_MIN = 8


class ClearReport(msgspec.Struct, frozen=True):
    """What was removed. `pages`: as many as the catalog knew."""

    namespaces: list[str]
    pages: int
    segments: int
    freed_bytes: int


def clear(
    pages: options.Pages,
    namespace: Annotated[
        str | None,
        typer.Option(help="The one to clear: its first digits, as `kvferry status` shows them."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear all of them.")] = False,
    catalog: options.CatalogUrl = None,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove the pages of a namespace, or all, from the disk and the catalog. May run beside
    engines: what they load or store at that moment is a miss; what they compute later, or still
    have in their own prefix cache, they may store again."""
    if (namespace is None) is not everything:
        raise ConfigError(
            "cli.clear",
            "say what to clear: --namespace and the first hexadecimal digits of one, as `kvferry"
            " status` shows them, or --all",
        )
    config = options.store_config(pages, catalog, usrbio_library)
    root, _ = existing_root(config)
    with open_store(config) as store:
        if store.catalog is None:
            raise UnavailableError(
                "cli.no_catalog",
                "there is no catalog of the store on this host: name it with --catalog, or empty"
                " the folder while no engine uses it",
            )
        refuse_rival(root, store.catalog.catalog_id, SystemClock())
        _require_all_roots(store.pages)
        report = examine(store, None if everything else namespace)
    if as_json:
        output.print_json(report)
        return
    print(
        f"{report.pages} pages in {report.segments} segments of {len(report.namespaces)} namespaces"
        f" removed: {output.size_text(report.freed_bytes)}"
    )


def _require_all_roots(pages: PageStore) -> None:
    """Raises UnavailableError where one is out: what is on it would come back with it."""
    out_count = getattr(pages, "out_count", None)  # only where there are several
    if out_count is not None and out_count():
        raise UnavailableError(
            "cli.roots_out",
            "nothing is cleared: a root of the store is not named or not mounted, and what is on it"
            " would come back with it",
        )


def examine(store: OpenedStore, prefix: str | None) -> ClearReport:
    """Clears the namespace that begins with these digits; None: all. A segment's file goes first:
    whoever is killed in between leaves a segment without a file, which is nothing, and not a file
    without a segment, whose pages would be taken over again. Commits of slots that were reserved
    before are refused, since their segments are unknown and no number is used twice."""
    owners = {number: entry.namespace for number, entry in store.catalog.segments().items()}
    owners |= {facts.segment: facts.namespace for facts in store.pages.segments()}
    page_counts = {space.namespace: space.page_count for space in store.catalog.stats().spaces}
    known = sorted({*owners.values(), *page_counts})
    chosen = known if prefix is None else [_named(prefix, known)]
    doomed = [number for number, namespace in sorted(owners.items()) if namespace in chosen]
    used_bytes = store.pages.used_bytes()
    with output.progress() as progress:
        for number in progress.track(doomed, description="removing segments"):
            store.pages.delete_segment(number)
            store.catalog.shrunk(number)
    return ClearReport(
        [namespace.hex() for namespace in chosen],
        sum(page_counts.get(namespace, 0) for namespace in chosen),
        len(doomed),
        max(0, used_bytes - store.pages.used_bytes()),
    )


def _named(prefix: str, known: Sequence[bytes]) -> bytes:
    """The one namespace whose hexadecimal digits begin so. Raises ConfigError."""
    found = [namespace for namespace in known if namespace.hex().startswith(prefix.lower())]
    if len(prefix) >= PREFIX_DIGITS_MIN and len(found) == 1:
        return found[0]
    names = ", ".join(namespace.hex()[:12] for namespace in known) or "none"
    raise ConfigError(
        "cli.namespace",
        f"--namespace {prefix!r} must be the first {PREFIX_DIGITS_MIN} digits or more of one"
        f" namespace; there are: {names}",
    )
