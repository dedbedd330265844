"""What people ask of an embedded catalog: lookups by namespace, and the hottest pages.

Lookups lie in the table `meta`, under the namespace; a catalog that has none there counts from 0.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

from kvferry.catalog.base import CLASS_COUNT, CatalogStats, HotPage, Space, SpaceStats, counted
from kvferry.catalog.lmdb_environment import Tables
from kvferry.catalog.lmdb_records import (
    Meta,
    PageRow,
    SpaceRow,
    address_key,
    catalog_stats,
    class_key,
    page_suffix,
    unpack_cold,
    unpack_published,
)
from kvferry.catalog.lookup_counts import Counts, sums
from kvferry.catalog.sweeping import SegmentHeat

_LOOKUPS = struct.Struct(">QQ")


def add_lookups(tables: Tables, meta: Meta, counts: Counts) -> Meta:
    """Returns `meta` with their sums."""
    for namespace, added in counts.items():
        both = map(sum, zip(_lookups(tables, namespace), added, strict=True))
        tables.meta.put(namespace, _LOOKUPS.pack(*both))
    lookups, hits = sums(counts)
    return meta._replace(lookup_count=meta.lookup_count + lookups, hit_count=meta.hit_count + hits)


def forget_lookups(tables: Tables, namespace: bytes) -> None:
    tables.meta.delete(namespace)


def stats(
    tables: Tables, meta: Meta, heats: Sequence[SegmentHeat], spaces: Sequence[Space]
) -> CatalogStats:
    found = catalog_stats(meta, heats, spaces)
    return replace(found, spaces=tuple(_with_lookups(tables, space) for space in found.spaces))


def _with_lookups(tables: Tables, space: SpaceStats) -> SpaceStats:
    return counted(space, {space.namespace: _lookups(tables, space.namespace)})


def hottest(
    tables: Tables, space: SpaceRow, shares: Sequence[int], age: int, count: int
) -> list[HotPage]:
    """`age`: of a page that is used now."""
    heads = [
        unpack_cold(packed)
        for share in shares
        for use in range(CLASS_COUNT)
        for packed in tables.cold.last(class_key(share, use), count)
    ]
    heads.sort(key=lambda head: (head.age, -head.chunk_index, head.address), reverse=True)
    pages = []
    for head in heads[:count]:
        key = unpack_published(tables.slots.get(address_key(head.address)))
        row = PageRow.unpack(tables.pages.get(key + page_suffix(space.number)))
        pages.append(HotPage(key, row.parent, row.chunk_index, age - row.age))
    return pages


def _lookups(tables: Tables, namespace: bytes) -> tuple[int, int]:
    packed = tables.meta.get(namespace)
    return _LOOKUPS.unpack(packed) if packed else (0, 0)
