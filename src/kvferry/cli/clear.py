"""`kvferry clear`: removes what a store holds, of one namespace, of one tenant, or all."""

from typing import Annotated

import msgspec
import typer

from kvferry.catalog.base import Share
from kvferry.cli import options, output
from kvferry.cli.catalog_rebuild import refuse_rival
from kvferry.cli.opened import OpenedStore, existing_root, named_namespace, open_store
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, UnavailableError
from kvferry.keys import tenant_id
from kvferry.offload.space.recovery import tenant_of
from kvferry.pages.base import PageStore


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
    tenant: Annotated[
        str | None, typer.Option(help="Instead: what engines with this tenant have stored.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear all of them.")] = False,
    catalog: options.CatalogUrl = None,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove the pages of a namespace, of a tenant, or all, from the disk and the catalog. May run
    beside engines: what they load or store at that moment is a miss; what they compute later, or
    still have in their own prefix cache, they may store again."""
    if (namespace is not None) + (tenant is not None) + everything != 1:
        raise ConfigError(
            "cli.clear",
            "say what to clear: --namespace and the first hexadecimal digits of one, as `kvferry"
            " status` shows them, --tenant and a name, or --all",
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
        report = examine(
            store,
            None if namespace is None else named_namespace(store, namespace),
            None if tenant is None else tenant_id(tenant),
        )
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


def examine(
    store: OpenedStore, namespace: bytes | None = None, tenant: bytes | None = None
) -> ClearReport:
    """Clears the segments of a namespace, of a tenant, or all. A segment's file goes first: whoever
    is killed in between leaves a segment without a file, which is nothing, and not a file without a
    segment, whose pages would be taken over again. Commits of slots that were reserved before are
    refused, since their segments are unknown and no number is used twice."""

    def is_chosen(share: Share) -> bool:
        return namespace in (None, share.namespace) and tenant in (None, share.tenant)

    shares = {n: Share(e.namespace, e.tenant) for n, e in store.catalog.segments().items()}
    for facts in store.pages.segments():
        if facts.segment not in shares:
            whose = tenant_of(list(store.pages.scan(facts.segment)))
            shares[facts.segment] = Share(facts.namespace, whose)
    doomed = [number for number, share in sorted(shares.items()) if is_chosen(share)]
    page_count = sum(s.page_count for s in store.catalog.stats().shares if is_chosen(s.share))
    used_bytes = store.pages.used_bytes()
    with output.progress() as progress:
        for number in progress.track(doomed, description="removing segments"):
            store.pages.delete_segment(number)
            store.catalog.shrunk(number)
    return ClearReport(
        sorted({shares[number].namespace.hex() for number in doomed}),
        page_count,
        len(doomed),
        max(0, used_bytes - store.pages.used_bytes()),
    )
