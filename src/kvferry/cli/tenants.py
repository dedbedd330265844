"""What tenants have of a store and what they are given, as commands show it."""

from collections.abc import Sequence

import msgspec

from kvferry.catalog.base import CatalogStats
from kvferry.keys import tenant_id
from kvferry.pages.base import StoreFacts
from kvferry.pages.limits import Limit, segment_counts

SHORT_DIGITS = 12
NO_NAME = "(none)"


class TenantStatus(msgspec.Struct, frozen=True):
    """One tenant. `name`: if a limit or nothing names it, else the first digits of its id, since
    headers and catalogs have no names. `guaranteed_bytes`, `maximum_bytes`: in whole segments."""

    id: str
    name: str
    segments: int
    pages: int
    bytes: int
    guaranteed_bytes: int
    maximum_bytes: int | None


def tenants_of(
    stats: CatalogStats, limits: Sequence[Limit], facts: StoreFacts
) -> list[TenantStatus]:
    """All that have a segment or a limit, by name."""
    own = {tenant_id(limit.tenant): limit for limit in limits if limit.tenant is not None}
    tenants = {share.share.tenant for share in stats.shares} | own.keys()
    return sorted(
        (_status(tenant, stats, own.get(tenant, Limit()), facts) for tenant in tenants),
        key=lambda status: (status.name, status.id),
    )


def _status(tenant: bytes, stats: CatalogStats, limit: Limit, facts: StoreFacts) -> TenantStatus:
    shares = [share for share in stats.shares if share.share.tenant == tenant]
    guaranteed_bytes, maximum_bytes = limit_bytes(limit, facts)
    return TenantStatus(
        tenant.hex(),
        limit.tenant or (tenant.hex()[:SHORT_DIGITS] if any(tenant) else NO_NAME),
        sum(share.segment_count for share in shares),
        sum(share.page_count for share in shares),
        sum(share.page_bytes for share in shares),
        guaranteed_bytes,
        maximum_bytes,
    )


def limit_bytes(limit: Limit, facts: StoreFacts) -> tuple[int, int | None]:
    """Guaranteed and maximum, as they are kept: in whole segments."""
    guaranteed_count, maximum_count = segment_counts(limit, facts)
    maximum_bytes = None if maximum_count is None else maximum_count * facts.segment_bytes
    return guaranteed_count * facts.segment_bytes, maximum_bytes
