"""A look at a store: its superblock, its catalog, and who uses it.

Each look opens the catalog and closes it again, so that one that was moved, replaced or resized
meanwhile is seen as it is; nothing is made, and nothing is kept from the engines.
"""

import os
from collections.abc import Sequence

import msgspec

from kvferry.catalog.base import HOTTEST_MAX, Catalog, HotPage, SpaceStats
from kvferry.cli.opened import NO_CATALOG, existing_root, open_catalog
from kvferry.cli.status import model_name
from kvferry.cli.tenants import TenantStatus, tenants_of
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.errors import UnavailableError
from kvferry.pages.limits import read_limits
from kvferry.pages.owner import Census
from kvferry.server_url import shown

SHORT_DIGITS = 12
"""Of namespaces and keys, as `kvferry status` shows them."""


class SpaceLook(msgspec.Struct, frozen=True):
    """One namespace. `chunk_tokens`: in one page."""

    namespace: str
    model: str
    pages: int
    bytes: int
    reserved: int
    graced: int
    segments: int
    chunk_tokens: int
    lookup_chunks: int
    hit_chunks: int


class Prefix(msgspec.Struct, frozen=True):
    """Pages that begin with the same chunk, of those used last. `key`: of that chunk; `pages`: how
    many of them; `tokens`: in the longest; `idle_minutes`: since the last use of any."""

    key: str
    namespace: str
    model: str
    pages: int
    tokens: int
    idle_minutes: int


class StoreLook(msgspec.Struct, frozen=True):
    """Sizes in bytes; counters since the catalog was made. `engines` None: not known yet."""

    store_id: str
    catalog: str
    capacity_bytes: int
    used_bytes: int
    disk_free_bytes: int
    engines: int | None
    published: int
    duplicates: int
    evicted: int
    expired: int
    lookup_chunks: int
    hit_chunks: int
    quota_refused: int
    quota_evicted: int
    lapsed: int
    namespaces: list[SpaceLook]
    tenants: list[TenantStatus]
    prefixes: list[Prefix]


class StoreWatch:
    """Looks at the store that `config` names. One thread: a sampler's. `prefix_pages`: so many of
    the hottest pages are read to find prefixes; 0: none."""

    def __init__(self, config: Config, clock: Clock, prefix_pages: int = 0):
        self._config = config
        self._clock = clock
        self._prefix_pages = min(prefix_pages, HOTTEST_MAX)
        self._census: Census | None = None

    def look(self) -> StoreLook:
        """Raises kvferry's errors and OSError."""
        root, superblock = existing_root(self._config)
        facts = superblock.facts()
        if self._census is None:
            self._census = Census(root, self._clock)
        catalog = open_catalog(self._config, facts)
        if catalog is None:
            raise UnavailableError("cli.no_catalog", NO_CATALOG)
        try:
            stats = catalog.stats()
            prefixes = [prefix for space in stats.spaces for prefix in self._hot(catalog, space)]
        finally:
            catalog.close()
        disk = os.statvfs(root)
        return StoreLook(
            store_id=facts.store_id.hex(),
            catalog=shown(self._config.catalog_url(facts.store_id)),
            capacity_bytes=facts.capacity_bytes,
            used_bytes=stats.segment_count * stats.segment_bytes,
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            engines=self._census.count(),
            published=stats.published_count,
            duplicates=stats.duplicate_count,
            evicted=stats.evicted_count,
            expired=stats.expired_count,
            lookup_chunks=stats.lookup_key_count,
            hit_chunks=stats.hit_key_count,
            quota_refused=stats.quota_refused_count,
            quota_evicted=stats.quota_evicted_count,
            lapsed=stats.lapsed_count,
            namespaces=list(map(_space_look, stats.spaces)),
            tenants=tenants_of(stats, read_limits(root), facts),
            prefixes=prefixes,
        )

    def _hot(self, catalog: Catalog, space: SpaceStats) -> list[Prefix]:
        if not self._prefix_pages or not space.page_count:
            return []
        return prefixes_of(space, catalog.hottest(space.namespace, self._prefix_pages))


def prefixes_of(space: SpaceStats, pages: Sequence[HotPage]) -> list[Prefix]:
    """The pages, which come hottest first and after their parents, by their first chunk."""
    first_of: dict[bytes, bytes] = {}
    found: dict[bytes, list[HotPage]] = {}
    for page in pages:
        first = first_of[page.key] = first_of.get(page.parent, page.key)
        found.setdefault(first, []).append(page)
    return [
        Prefix(
            key=first.hex()[:SHORT_DIGITS],
            namespace=space.namespace.hex()[:SHORT_DIGITS],
            model=model_name(space.description),
            pages=len(own),
            tokens=space.chunk_tokens * (1 + max(page.chunk_index for page in own)),
            idle_minutes=min(page.idle_minutes for page in own),
        )
        for first, own in found.items()
    ]


def _space_look(space: SpaceStats) -> SpaceLook:
    return SpaceLook(
        namespace=space.namespace.hex()[:SHORT_DIGITS],
        model=model_name(space.description),
        pages=space.page_count,
        bytes=space.page_count * space.slot_bytes,
        reserved=space.reserved_count,
        graced=space.graced_count,
        segments=space.segment_count,
        chunk_tokens=space.chunk_tokens,
        lookup_chunks=space.lookup_key_count,
        hit_chunks=space.hit_key_count,
    )
