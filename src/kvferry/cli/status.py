"""`kvferry status`: what a store holds, for whom, and how well it serves."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.catalog.base import CatalogStats, SpaceStats
from kvferry.cli import options, output
from kvferry.cli.opened import NO_CATALOG, OpenedStore, existing_root, open_store
from kvferry.cli.output import size_text
from kvferry.cli.tenants import NO_NAME, TenantStatus, tenants_of
from kvferry.pages.limits import Limit, read_limits


class SpaceStatus(msgspec.Struct, frozen=True):
    """One namespace: one model, as one kind of engine sees it."""

    namespace: str
    description: str
    pages: int
    bytes: int
    reserved: int
    graced: int
    segments: int


class CatalogStatus(msgspec.Struct, frozen=True):
    """Counters since the catalog was created. `hit_rate` None: nothing was looked up."""

    url: str
    pages: int
    segments: int
    looked_up_keys: int
    hit_keys: int
    hit_rate: float | None
    published: int
    duplicates: int
    expired: int
    evicted: int
    quota_refused: int
    quota_evicted: int
    lapsed: int
    namespaces: list[SpaceStatus]
    tenants: list[TenantStatus]


class StoreStatus(msgspec.Struct, frozen=True):
    """Everything that `status` says. `catalog` None: there is none on this host."""

    store_id: str
    capacity_bytes: int
    used_bytes: int
    segment_bytes: int
    alignment_bytes: int
    catalog: CatalogStatus | None


def status(
    pages: options.Pages,
    catalog: options.CatalogUrl = None,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Show pages, bytes, hit rate and evictions of a store, by namespace and tenant."""
    config = options.store_config(pages, catalog, usrbio_library)
    root, _ = existing_root(config)
    with open_store(config) as store:
        report = examine(store, read_limits(root))
    if as_json:
        output.print_json(report)
    else:
        _print(report)


def examine(store: OpenedStore, limits: Sequence[Limit] = ()) -> StoreStatus:
    facts, catalog = store.facts, None
    if store.catalog is not None:
        stats = store.catalog.stats()
        tenants = tenants_of(stats, limits, facts)
        catalog = _catalog_status(store.catalog_url, stats, tenants)
    return StoreStatus(
        facts.store_id.hex(),
        facts.capacity_bytes,
        store.pages.used_bytes(),
        facts.segment_bytes,
        facts.alignment_bytes,
        catalog,
    )


def _catalog_status(url: str, stats: CatalogStats, tenants: list[TenantStatus]) -> CatalogStatus:
    looked_up = stats.lookup_key_count
    return CatalogStatus(
        url,
        sum(space.page_count for space in stats.spaces),
        stats.segment_count,
        looked_up,
        stats.hit_key_count,
        stats.hit_key_count / looked_up if looked_up else None,
        stats.published_count,
        stats.duplicate_count,
        stats.expired_count,
        stats.evicted_count,
        stats.quota_refused_count,
        stats.quota_evicted_count,
        stats.lapsed_count,
        [_space_status(space) for space in stats.spaces],
        tenants,
    )


def _space_status(space: SpaceStats) -> SpaceStatus:
    return SpaceStatus(
        space.namespace.hex(),
        space.description,
        space.page_count,
        space.page_count * space.slot_bytes,
        space.reserved_count,
        space.graced_count,
        space.segment_count,
    )


def _print(report: StoreStatus) -> None:
    used, capacity = size_text(report.used_bytes), size_text(report.capacity_bytes)
    print(f"store {report.store_id}: {used} of {capacity}")
    if report.catalog is None:
        print(NO_CATALOG)
        return
    catalog = report.catalog
    rate = "none looked up" if catalog.hit_rate is None else f"{catalog.hit_rate:.1%} of lookups"
    print(f"hits: {catalog.hit_keys} of {catalog.looked_up_keys} chunks ({rate})")
    print(
        f"pages: {catalog.pages} now, {catalog.published} published, {catalog.duplicates}"
        f" duplicates, {catalog.evicted} evicted, {catalog.expired} reservations expired"
    )
    columns = ("namespace", "pages", "size", "reserved", "segments", "model")
    output.print_table(columns, [_row(space) for space in catalog.namespaces])
    if any(tenant.name != NO_NAME for tenant in catalog.tenants):
        columns = ("tenant", "pages", "size", "segments", "guaranteed", "maximum")
        output.print_table(columns, [_tenant_row(tenant) for tenant in catalog.tenants])
        print(
            f"for quotas: {catalog.quota_evicted} pages evicted, {catalog.quota_refused} times no"
            f" new segment; {catalog.lapsed} pages lapsed"
        )


def _row(space: SpaceStatus) -> tuple[str, ...]:
    return (
        space.namespace[:12],
        str(space.pages),
        size_text(space.bytes),
        str(space.reserved),
        str(space.segments),
        model_name(space.description),
    )


def _tenant_row(tenant: TenantStatus) -> tuple[str, ...]:
    maximum_bytes = tenant.maximum_bytes
    return (
        tenant.name,
        str(tenant.pages),
        size_text(tenant.bytes),
        str(tenant.segments),
        size_text(tenant.guaranteed_bytes),
        "-" if maximum_bytes is None else size_text(maximum_bytes),
    )


def model_name(description: str) -> str:
    """The model's name in an identity record, if it has one; the record is for people."""
    try:
        record = msgspec.json.decode(description)
    except (msgspec.DecodeError, RecursionError):
        return description[:40]
    model = record.get("model", description) if isinstance(record, dict) else description
    if isinstance(model, dict):
        model = model.get("name") or _source(model)
    return str(model)[:40]


def _source(model: dict[str, Any]) -> str:
    """Of a model without a name: what its keys are made from."""
    kind, content = next(iter(model.items()), ("unknown", ""))
    return f"{kind} {content[:12]}" if isinstance(content, str) else kind
