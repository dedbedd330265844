"""Records of the embedded catalog, version 3: keys and values of its tables.

Keys are big-endian, so that they sort by what they say, and so are values, but for `PageRow`, which
begins with a `PACKED_HIT`. Spaces and shares are named by numbers inside keys, which keeps these
short.

| table | key | value |
| --- | --- | --- |
| meta | `catalog` | `Meta` |
| meta | namespace | lookups and hits: `lmdb_figures` |
| spaces | namespace | `SpaceRow` |
| segments | number | `SegmentHeat`, less its number |
| slots | address | `ReservedRow`, or the key of the published page |
| shares | namespace, tenant | number |
| quotas | owner | `QuotaRow` |
| free | share, address | nothing |
| timers | moment, kind, address | nothing |
| pages | page key, space | `PageRow` |
| cold | share, class of uses, age, 2^32-1 - chunk index, address | nothing |
| ghosts | space, number of a bucket | ghosts, as `eviction` packs them |

History: 1, first. 2, uses of a page, ghosts; ages in steps of 10 s. 3, shares and quotas. A file of
an earlier version starts empty and is filled from the pages.
"""

import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from kvferry.catalog.base import PACKED_HIT, CatalogStats, Share, Space
from kvferry.catalog.eviction import Head, Recall, use_class
from kvferry.catalog.quotas import QuotaRow
from kvferry.catalog.snapshot import SegmentState
from kvferry.catalog.sweeping import SegmentHeat, share_stats, space_stats
from kvferry.layout import Address

FORMAT_VERSION = 3
META_KEY = b"catalog"
NO_KEY = bytes(32)

TABLES = (
    "meta",
    "spaces",
    "shares",
    "quotas",
    "segments",
    "slots",
    "free",
    "timers",
    "pages",
    "cold",
    "ghosts",
)

LEASE = 1
GRACE = 2

_META = struct.Struct(">I16s16sQQ16sddIIIQQQQQQQQQ")
_SPACE = struct.Struct(">IIQIIddII")
_SEGMENT = struct.Struct(">32s16sBdIIIIQ")
_QUOTA = struct.Struct(">IIdd")
_RESERVED = struct.Struct(">c16sd32s")
_PUBLISHED = struct.Struct(">c32s")
_PAGE = struct.Struct("<II16sII32sB")
_NUMBER = struct.Struct(">I")
_ADDRESS = struct.Struct(">II")
_FREE = struct.Struct(">III")
_TIMER = struct.Struct(">dBII")
_COLD = struct.Struct(">IBIIII")
_CLASS = struct.Struct(">IB")
_BUCKET = struct.Struct(">II")
_CHUNK_MAX = 2**32 - 1

packed_hit = itemgetter(slice(PACKED_HIT.size))
"""The `PACKED_HIT` at the start of a packed `PageRow`."""
packed_age = itemgetter(slice(24, 28))
"""Its age, as `pack_age` makes it."""
pack_age = struct.Struct("<I").pack
NO_AGE = pack_age(2**32 - 1)
ABSENT_PAGE = bytes(24) + NO_AGE + bytes(37)
"""Stands for a page that is not there: its hit is a miss, its age is none."""


class Meta(NamedTuple):
    """What the catalog says of itself. Time is `offset_s` + the host's, never below `last_s`."""

    catalog_id: bytes
    store_id: bytes
    capacity_bytes: int
    segment_bytes: int
    boot_id: bytes
    offset_s: float
    last_s: float
    next_segment: int = 0
    next_space: int = 0
    next_share: int = 0
    lookup_count: int = 0
    hit_count: int = 0
    published_count: int = 0
    duplicate_count: int = 0
    expired_count: int = 0
    evicted_count: int = 0
    quota_refused_count: int = 0
    quota_evicted_count: int = 0
    lapsed_count: int = 0

    def pack(self) -> bytes:
        return _META.pack(FORMAT_VERSION, *self)

    @classmethod
    def unpack(cls, packed: bytes) -> "Meta | None":
        """None: another version's."""
        if len(packed) != _META.size:
            return None
        version, *fields = _META.unpack(packed)
        return cls(*fields) if version == FORMAT_VERSION else None


class SpaceRow(NamedTuple):
    """A namespace: its number, what `attach` said, and what its evictions taught."""

    number: int
    space: Space
    attached_s: float
    recall: Recall = Recall()

    def pack(self) -> bytes:
        s = self.space
        sizes = (s.slot_count, s.slot_bytes, s.slice_count, s.chunk_tokens)
        return (
            _SPACE.pack(self.number, *sizes, self.attached_s, *self.recall) + s.description.encode()
        )

    @classmethod
    def unpack(cls, namespace: bytes, packed: bytes) -> "SpaceRow":
        number, *fields = _SPACE.unpack_from(packed)
        sizes, attached_s, recall = fields[:4], fields[4], Recall._make(fields[5:])
        space = Space(namespace, *sizes, description=packed[_SPACE.size :].decode())
        return cls(number, space, attached_s, recall)


class ReservedRow(NamedTuple):
    """A reserved slot. `key`: NO_KEY before the first commit; `slices`: a bit for each."""

    generation: bytes
    lease_end_s: float
    key: bytes
    slices: int

    def pack(self) -> bytes:
        bits = self.slices.to_bytes((self.slices.bit_length() + 7) // 8, "big")
        return _RESERVED.pack(b"R", self.generation, self.lease_end_s, self.key) + bits

    @classmethod
    def unpack(cls, packed: bytes) -> "ReservedRow | None":
        """None: the slot is published."""
        if not packed.startswith(b"R"):
            return None
        _, generation, lease_end_s, key = _RESERVED.unpack_from(packed)
        return cls(generation, lease_end_s, key, int.from_bytes(packed[_RESERVED.size :], "big"))


class PageRow(NamedTuple):
    """A published page."""

    segment: int
    slot: int
    generation: bytes
    age: int
    chunk_index: int
    parent: bytes
    uses: int

    @property
    def address(self) -> Address:
        return Address(self.segment, self.slot)

    def pack(self) -> bytes:
        return _PAGE.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> "PageRow":
        return cls._make(_PAGE.unpack(packed))


class Timer(NamedTuple):
    """Something that ends by itself: a lease or a grace time."""

    moment_s: float
    kind: int
    segment: int
    slot: int

    def pack(self) -> bytes:
        return _TIMER.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> "Timer":
        return cls._make(_TIMER.unpack(packed))


def pack_segment(heat: SegmentHeat) -> bytes:
    return _SEGMENT.pack(
        *heat.share,
        heat.state.value,
        heat.until_s,
        heat.slot_count,
        heat.page_count,
        heat.reserved_count,
        heat.graced_count,
        heat.age_sum,
    )


def unpack_segment(number: int, packed: bytes) -> SegmentHeat:
    namespace, tenant, state, *figures = _SEGMENT.unpack(packed)
    return SegmentHeat(number, Share(namespace, tenant), SegmentState(state), *figures)


def pack_quota(row: QuotaRow) -> bytes:
    return _QUOTA.pack(*row)


def unpack_quota(packed: bytes) -> QuotaRow:
    return QuotaRow._make(_QUOTA.unpack(packed))


def pack_published(key: bytes) -> bytes:
    return _PUBLISHED.pack(b"P", key)


def unpack_published(packed: bytes) -> bytes:
    return _PUBLISHED.unpack(packed)[1]


def catalog_stats(
    meta: Meta, heats: Sequence[SegmentHeat], spaces: Sequence[Space]
) -> CatalogStats:
    return CatalogStats(
        capacity_bytes=meta.capacity_bytes,
        segment_bytes=meta.segment_bytes,
        segment_count=len(heats),
        spaces=tuple(space_stats(space, heats) for space in spaces),
        lookup_key_count=meta.lookup_count,
        hit_key_count=meta.hit_count,
        published_count=meta.published_count,
        duplicate_count=meta.duplicate_count,
        expired_count=meta.expired_count,
        evicted_count=meta.evicted_count,
        shares=share_stats(heats, spaces),
        quota_refused_count=meta.quota_refused_count,
        quota_evicted_count=meta.quota_evicted_count,
        lapsed_count=meta.lapsed_count,
    )


def number_key(number: int) -> bytes:
    """Key of a segment, and prefix of its slots."""
    return _NUMBER.pack(number)


def unpack_number(packed: bytes) -> int:
    return _NUMBER.unpack(packed)[0]


def address_key(address: Address) -> bytes:
    return _ADDRESS.pack(*address)


def unpack_address(packed: bytes) -> Address:
    return Address._make(_ADDRESS.unpack(packed))


def free_key(share: int, address: Address) -> bytes:
    return _FREE.pack(share, *address)


def unpack_free(packed: bytes) -> Address:
    return Address._make(_FREE.unpack(packed)[1:])


def page_suffix(space: int) -> bytes:
    """What follows a page's key in the key of its row."""
    return _NUMBER.pack(space)


def cold_key(share: int, page: PageRow) -> bytes:
    coldness = _CHUNK_MAX - page.chunk_index
    use = use_class(page.uses)
    return _COLD.pack(share, use, page.age, coldness, page.segment, page.slot)


def unpack_cold(packed: bytes) -> Head:
    _, _, age, coldness, segment, slot = _COLD.unpack(packed)
    return Head(age, _CHUNK_MAX - coldness, Address(segment, slot))


def class_key(share: int, use: int) -> bytes:
    """What the keys of the pages of one class begin with in `cold`."""
    return _CLASS.pack(share, use)


def bucket_key(space: int, bucket: int) -> bytes:
    return _BUCKET.pack(space, bucket)
