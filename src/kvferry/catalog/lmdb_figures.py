"""What people ask of an embedded catalog: lookups by namespace, and the hottest pages.

Lookups lie in the table `meta`, under the namespace; a catalog that has none there counts from 0.
"""

import struct

from kvferry.catalog.base import HotPage, SpaceStats, counted
from kvferry.catalog.lmdb_environment import Tables
from kvferry.catalog.lmdb_records import (
    Meta,
    PageRow,
    SpaceRow,
    address_key,
    number_key,
    page_suffix,
    unpack_cold,
    unpack_published,
)
from kvferry.catalog.lookup_counts import Counts, sums

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


def with_lookups(tables: Tables, space: SpaceStats) -> SpaceStats:
    return counted(space, {space.namespace: _lookups(tables, space.namespace)})


def hottest(tables: Tables, space: SpaceRow, age: int, count: int) -> list[HotPage]:
    """`age`: of a page that is used now."""
    pages = []
    for packed in tables.cold.last(number_key(space.number), count):
        key = unpack_published(tables.slots.get(address_key(unpack_cold(packed)[1])))
        row = PageRow.unpack(tables.pages.get(key + page_suffix(space.number)))
        pages.append(HotPage(key, row.parent, row.chunk_index, age - row.age))
    return pages


def _lookups(tables: Tables, namespace: bytes) -> tuple[int, int]:
    packed = tables.meta.get(namespace)
    return _LOOKUPS.unpack(packed) if packed else (0, 0)
