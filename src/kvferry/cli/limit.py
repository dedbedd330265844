"""`kvferry limit`: what tenants and namespaces of a store are guaranteed and may have at most, and
for how long pages stay unused."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import typer

from kvferry.catalog.base import EVERYBODY
from kvferry.cli import options, output
from kvferry.cli.opened import OpenedStore, existing_root, named_namespace, open_store
from kvferry.cli.output import size_text
from kvferry.cli.tenants import limit_bytes
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError
from kvferry.offload.space.quotas import owner_of, quotas_of
from kvferry.pages.limits import Limit, read_limits, write_limits
from kvferry.setting_values import parse_duration_s, parse_size


class LimitStatus(msgspec.Struct, frozen=True):
    """One limit, in whole segments, and what its owner has now. `tenant` or `namespace` is None, or
    both: everybody."""

    tenant: str | None
    namespace: str | None
    guaranteed_bytes: int
    maximum_bytes: int | None
    ttl_s: float
    segments: int
    segment_bytes: int


class LimitReport(msgspec.Struct, frozen=True):
    """`is_told`: whether there is a catalog on this host, which knows them now."""

    capacity_bytes: int
    limits: list[LimitStatus]
    is_told: bool


class Given(NamedTuple):
    """What the command line says of one limit. None: nothing."""

    guaranteed: str | None
    maximum: str | None
    ttl: str | None
    is_removal: bool

    @property
    def is_change(self) -> bool:
        return self != Given(None, None, None, False)


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
    ttl: Annotated[
        str | None,
        typer.Option(
            help='Its pages go when nobody has used them for so long: seconds, or "36h"; 0: never.'
            " Without --tenant or --namespace: all pages."
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="It has no limits any more.")] = False,
    catalog: options.CatalogUrl = None,
    usrbio_library: options.UsrbioLibrary = None,
    as_json: options.AsJson = False,
) -> None:
    """Set what a tenant or a namespace is guaranteed and may have at most, or a time to live; or
    show all limits. May run beside engines. What is guaranteed and not used, others may use until
    it is wanted."""
    given = Given(guaranteed, maximum, ttl, remove)
    _check(tenant, namespace, given)
    config = options.store_config(pages, catalog, usrbio_library)
    root, _ = existing_root(config)
    with open_store(config) as store:
        limits = read_limits(root)
        if given.is_change:
            owner = Limit(tenant, namespace and named_namespace(store, namespace).hex())
            limits = changed(limits, owner, given)
            write_limits(root, limits, store.facts, SystemClock())
            if store.catalog is not None:
                store.catalog.set_quotas(quotas_of(limits, store.facts))
        report = examine(store, limits)
    if as_json:
        output.print_json(report)
    else:
        _print(report)


def _check(tenant: str | None, namespace: str | None, given: Given) -> None:
    is_named = tenant is not None or namespace is not None
    if tenant is not None and namespace is not None:
        raise ConfigError("cli.limit", "say --tenant or --namespace, not both")
    if is_named and not given.is_change:
        raise ConfigError("cli.limit", "say the limit: --guaranteed, --maximum, --ttl or --remove")
    if not is_named and (given.guaranteed is not None or given.maximum is not None):
        raise ConfigError("cli.limit", "say whose limit: --tenant NAME or --namespace DIGITS")


def changed(limits: Sequence[Limit], owner: Limit, given: Given) -> list[Limit]:
    """With one more limit, or another in its place; what is not given stays as it was."""
    others = [other for other in limits if owner_of(other) != owner_of(owner)]
    if given.is_removal:
        return others
    known = next((other for other in limits if owner_of(other) == owner_of(owner)), owner)
    sizes: dict[str, float] = {}
    if given.guaranteed is not None:
        sizes["guaranteed_bytes"] = parse_size("guaranteed", given.guaranteed)
    if given.maximum is not None:
        sizes["maximum_bytes"] = parse_size("maximum", given.maximum)
    if given.ttl is not None:
        sizes["ttl_s"] = parse_duration_s("ttl", given.ttl)
    return [*others, msgspec.structs.replace(known, **sizes)]


def examine(store: OpenedStore, limits: Sequence[Limit]) -> LimitReport:
    shares = store.catalog.stats().shares if store.catalog else ()
    found = []
    for one in limits:
        owner = owner_of(one)
        own = sum(s.segment_count for s in shares if owner == EVERYBODY or owner in s.share)
        sizes = limit_bytes(one, store.facts)
        segment_bytes = own * store.facts.segment_bytes
        found.append(LimitStatus(one.tenant, one.namespace, *sizes, one.ttl_s, own, segment_bytes))
    return LimitReport(store.facts.capacity_bytes, found, store.catalog is not None)


def _print(report: LimitReport) -> None:
    rows = [_row(one) for one in report.limits]
    output.print_table(("owner", "guaranteed", "maximum", "unused for", "has"), rows)
    total_bytes = sum(one.guaranteed_bytes for one in report.limits)
    print(f"guaranteed: {size_text(total_bytes)} of {size_text(report.capacity_bytes)}")
    if not report.is_told:
        print("no catalog on this host: engines take the limits in when they start")


def _row(one: LimitStatus) -> tuple[str, ...]:
    owner = "everybody" if one.tenant is None else f"tenant {one.tenant}"
    if one.namespace is not None:
        owner = f"namespace {one.namespace[:12]}"
    return (
        owner,
        size_text(one.guaranteed_bytes),
        "-" if one.maximum_bytes is None else size_text(one.maximum_bytes),
        f"{one.ttl_s:.0f} s" if one.ttl_s else "-",
        size_text(one.segment_bytes),
    )
