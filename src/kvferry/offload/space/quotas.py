"""From the limits of a store, which its home has, to the quotas of a catalog, which has a copy."""

from collections.abc import Sequence
from pathlib import Path

from kvferry.catalog.base import EVERYBODY, NO_MAXIMUM, Catalog, Quota
from kvferry.keys import tenant_id
from kvferry.pages.base import StoreFacts
from kvferry.pages.limits import Limit, read_limits, segment_counts


def tell_quotas(catalog: Catalog, home: Path, facts: StoreFacts) -> None:
    """On the catalog's thread, each time that it is opened. Raises as `read_limits` and the catalog
    say."""
    catalog.set_quotas(quotas_of(read_limits(home), facts))


def quotas_of(limits: Sequence[Limit], facts: StoreFacts) -> list[Quota]:
    return [_quota(limit, facts) for limit in limits]


def _quota(limit: Limit, facts: StoreFacts) -> Quota:
    guaranteed_count, maximum_count = segment_counts(limit, facts)
    return Quota(
        owner_of(limit),
        guaranteed_count,
        NO_MAXIMUM if maximum_count is None else maximum_count,
        limit.ttl_s,
    )


def owner_of(limit: Limit) -> bytes:
    """The tenant's or the namespace's id, or `EVERYBODY`."""
    if limit.namespace is not None:
        return bytes.fromhex(limit.namespace)
    return EVERYBODY if limit.tenant is None else tenant_id(limit.tenant)
