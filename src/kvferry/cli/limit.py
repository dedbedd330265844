"""`kvferry limit`: what tenants and namespaces of a store are guaranteed, and may have at most."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from kvferry.cli import options, output
from kvferry.cli.opened import OpenedStore, existing_root, named_namespace, open_store
from kvferry.cli.output import size_text
from kvferry.cli.tenants import limit_bytes
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError
from kvferry.offload.space.quotas import owner_of, quotas_of
from kvferry.pages.limits import Limit, read_limits, write_limits
from kvferry.setting_values import parse_size


class LimitStatus(msgspec.Struct, frozen=True):
    """One limit, in whole segments, and what its owner has now. `tenant` or `namespace` is None."""

    tenant: str | None
    namespace: str | None
    guaranteed_bytes: int
    maximum_bytes: int | None
    segments: int
    segment_bytes: int


class LimitReport(msgspec.Struct, frozen=True):
    """`is_told`: whether there is a catalog on this host, which knows them now."""

    capacity_bytes: int
    limits: list[LimitStatus]
    is_told: bool


def limit(
    pages: options.Pages,
    tenant: Annotated[
        str | None, typer.Option(help='Name of the tenant, as in the engines\' setting "tenant".')
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Instead: a namespace, by its first digits, as `kvferry status` shows."),
    ] = None,
    guaranteed: Annotated[
        str | None, typer.Option(help='What others cannot take from it: bytes, or "100GiB".')
    ] = None,
    maximum: Annotated[str | None, typer.Option(help="What it never has more than.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="It has no limits any more.")] = False,
    catalog: options.CatalogUrl = None,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Set what a tenant or a namespace is guaranteed and may have at most, or show all limits. May
    run beside engines. What is guaranteed and not used, others may use until it is wanted."""
    is_change = remove or guaranteed is not None or maximum is not None
    if (tenant is None) is (namespace is None) and (is_change or tenant is not None):
        raise ConfigError("cli.limit", "say whose limit: --tenant NAME or --namespace DIGITS")
    if not is_change and (tenant is not None or namespace is not None):
        raise ConfigError("cli.limit", "say the limit: --guaranteed, --maximum or --remove")
    config = options.store_config(pages, catalog, usrbio_library)
    root, _ = existing_root(config)
    with open_store(config) as store:
        limits = read_limits(root)
        if is_change:
            owner = Limit(tenant, namespace and named_namespace(store, namespace).hex())
            limits = changed(limits, owner, guaranteed, maximum, remove)
            write_limits(root, limits, store.facts, SystemClock())
            if store.catalog is not None:
                store.catalog.set_quotas(quotas_of(limits, store.facts))
        report = examine(store, limits)
    if as_json:
        output.print_json(report)
    else:
        _print(report)


def changed(
    limits: Sequence[Limit],
    owner: Limit,
    guaranteed: str | None,
    maximum: str | None,
    remove: bool,
) -> list[Limit]:
    """With one more limit, or another in its place; what is not given stays as it was."""
    others = [other for other in limits if owner_of(other) != owner_of(owner)]
    if remove:
        return others
    known = next((other for other in limits if owner_of(other) == owner_of(owner)), owner)
    if guaranteed is not None:
        size_bytes = parse_size("guaranteed", guaranteed)
        known = msgspec.structs.replace(known, guaranteed_bytes=size_bytes)
    if maximum is not None:
        known = msgspec.structs.replace(known, maximum_bytes=parse_size("maximum", maximum))
    return [*others, known]


def examine(store: OpenedStore, limits: Sequence[Limit]) -> LimitReport:
    shares = store.catalog.stats().shares if store.catalog else ()
    found = []
    for one in limits:
        own = sum(share.segment_count for share in shares if owner_of(one) in share.share)
        sizes = limit_bytes(one, store.facts)
        segment_bytes = own * store.facts.segment_bytes
        found.append(LimitStatus(one.tenant, one.namespace, *sizes, own, segment_bytes))
    return LimitReport(store.facts.capacity_bytes, found, store.catalog is not None)


def _print(report: LimitReport) -> None:
    rows = [_row(one) for one in report.limits]
    output.print_table(("owner", "guaranteed", "maximum", "has"), rows)
    total_bytes = sum(one.guaranteed_bytes for one in report.limits)
    print(f"guaranteed: {size_text(total_bytes)} of {size_text(report.capacity_bytes)}")
    if not report.is_told:
        print("no catalog on this host: engines take the limits in when they start")


def _row(one: LimitStatus) -> tuple[str, ...]:
    owner = f"tenant {one.tenant}" if one.namespace is None else f"namespace {one.namespace[:12]}"
    maximum = "-" if one.maximum_bytes is None else size_text(one.maximum_bytes)
    return owner, size_text(one.guaranteed_bytes), maximum, size_text(one.segment_bytes)
