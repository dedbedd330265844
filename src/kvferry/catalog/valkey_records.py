"""What is said to the functions of the catalog on Valkey, and how their answers are read.

The layouts are those of `valkey_rules/`; docs/design/0009 has the keys of the records.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvferry.catalog.base import (
    CatalogStats,
    Commit,
    HotPage,
    Page,
    Policy,
    Quota,
    Share,
    ShareStats,
    Slot,
    Space,
    SpaceStats,
    Want,
)
from kvferry.catalog.lookup_counts import Counts
from kvferry.catalog.snapshot import (
    PageEntry,
    ReservedEntry,
    SegmentEntry,
    SegmentState,
    Snapshot,
)
from kvferry.errors import CorruptError
from kvferry.layout import Address

NO_KEY = bytes(32)

NUMBER = struct.Struct("<I")
LEASE = struct.Struct("<d")
SLOT = struct.Struct("<II16s")
ADOPTED = struct.Struct("<IB")
SWEPT = struct.Struct("<IIII")
SIZES = struct.Struct(">IdII")

_RULES = struct.Struct("<dB")
_LOOKUPS = struct.Struct("<32sII")
_HOT_PAGE = struct.Struct("<32s32sII")
_COMMIT = struct.Struct("<32s32sIII16sii")
_FOUND = struct.Struct("<32s32sII16s")
_WANTED = struct.Struct("<32sI16s")
_TOLD = struct.Struct("<B32sIId")
_SPACE = struct.Struct(">IIdII")
_TOTALS = struct.Struct(">IIIIIII")
_LEARNED = struct.Struct(">dII")
_QUOTA = struct.Struct(">IIdd")
_SEGMENT = struct.Struct(">II32s16sBdIIIId")
_PAGE = struct.Struct("<II16sII32sB")
_RESERVED = struct.Struct("<c16sd32s")


def pack_header(grace_s: float, policy: Policy, counts: Counts) -> bytes:
    """Grace time, whether the policy is `adaptive`; lookups and hits that were not told yet, by
    namespace."""
    packed = (_LOOKUPS.pack(namespace, *told) for namespace, told in counts.items())
    return _RULES.pack(grace_s, policy is Policy.ADAPTIVE) + b"".join(packed)


def unpack_hottest(answer: tuple[bytes]) -> list[HotPage]:
    return [HotPage(*fields) for fields in _HOT_PAGE.iter_unpack(answer)]


def pack_sizes(space: Space) -> bytes:
    return SIZES.pack(
        space.slot_count, float(space.slot_bytes), space.slice_count, space.chunk_tokens
    )


def sized_space(namespace: bytes, packed: bytes) -> Space:
    """A `Space` of these sizes, without a description."""
    slot_count, slot_bytes, slice_count, chunk_tokens = SIZES.unpack(packed)
    return Space(namespace, slot_count, int(slot_bytes), slice_count, chunk_tokens, "")


def pack_commits(commits: Sequence[Commit]) -> bytes:
    return b"".join(
        _COMMIT.pack(
            c.key,
            c.parent,
            c.chunk_index,
            *c.slot.address,
            c.slot.generation,
            c.first_slice,
            c.slice_count,
        )
        for c in commits
    )


def pack_slots(slots: Sequence[Slot]) -> bytes:
    return b"".join(SLOT.pack(*slot.address, slot.generation) for slot in slots)


def unpack_slots(packed: bytes) -> list[Slot]:
    return [
        Slot(Address(segment, slot), generation)
        for segment, slot, generation in SLOT.iter_unpack(packed)
    ]


def pack_found(pages: Sequence[Page]) -> bytes:
    return b"".join(
        _FOUND.pack(p.key, p.parent, p.chunk_index, p.address.slot, p.generation) for p in pages
    )


def pack_wanted(wanted: Sequence[Want]) -> bytes:
    return b"".join(_WANTED.pack(*want) for want in wanted)


def pack_quotas(quotas: Sequence[Quota]) -> bytes:
    return b"".join(_TOLD.pack(len(quota.owner), *quota) for quota in quotas)


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    return tuple(number for (number,) in NUMBER.iter_unpack(packed))


def pairs(fields: Sequence[Any]) -> list[tuple[Any, Any]]:
    """A hash as the server lists it: names and values in turn."""
    return list(zip(fields[::2], fields[1::2], strict=True))


def unpack_segment(packed: bytes) -> SegmentEntry:
    _, _, namespace, tenant, state, until_s, slot_count, *_ = _SEGMENT.unpack(packed)
    return SegmentEntry(namespace, SegmentState(state), until_s, slot_count, tenant)


class _Totals(NamedTuple):
    """Sums over the segments of a share."""

    segments: int = 0
    live: int = 0
    ready: int = 0
    pages: int = 0
    reserved: int = 0
    graced: int = 0
    soon_free: int = 0


def read_stats(
    meta: Sequence[bytes],
    segment_count: int,
    spaces: Sequence[Any],
    shares: Sequence[tuple[bytes, bytes]],
) -> CatalogStats:
    capacity, segment, lookup, hit, published, duplicate, expired, evicted, *quota = map(int, meta)
    totals = {
        Share(name[:32], name[32:]): _Totals(*_TOTALS.unpack(packed)) for name, packed in shares
    }
    found = [_space_stats(namespace, totals, *row) for namespace, row in sorted(pairs(spaces))]
    slot_bytes = {space.namespace: space.slot_bytes for space in found}
    return CatalogStats(
        capacity_bytes=capacity,
        segment_bytes=segment,
        segment_count=segment_count,
        spaces=tuple(found),
        lookup_key_count=lookup,
        hit_key_count=hit,
        published_count=published,
        duplicate_count=duplicate,
        expired_count=expired,
        evicted_count=evicted,
        shares=tuple(
            ShareStats(share, own.segments, own.pages, own.pages * slot_bytes[share.namespace])
            for share, own in sorted(totals.items())
            if own.segments
        ),
        quota_refused_count=quota[0],
        quota_evicted_count=quota[1],
        lapsed_count=quota[2],
    )


def _space_stats(
    namespace: bytes,
    totals: Mapping[Share, _Totals],
    row: bytes,
    lookups: bytes | None,
    hits: bytes | None,
) -> SpaceStats:
    _, _, slot_bytes, _, chunk_tokens = _SPACE.unpack_from(row)
    own = [_Totals(), *(sums for share, sums in totals.items() if share.namespace == namespace)]
    sums = _Totals(*map(sum, zip(*own, strict=True)))
    return SpaceStats(
        namespace=namespace,
        description=row[_SPACE.size :].decode(),
        page_count=sums.pages,
        reserved_count=sums.reserved,
        graced_count=sums.graced,
        segment_count=sums.segments,
        slot_bytes=int(slot_bytes),
        chunk_tokens=chunk_tokens,
        lookup_key_count=int(lookups or 0),
        hit_key_count=int(hits or 0),
    )


class Audit:
    """Collects what `audit` answers, part by part, and tells it as a `Snapshot`."""

    def __init__(self) -> None:
        self.last_segment = -1
        self._recalls: dict[bytes, tuple[float, int, int]] = {}
        self._quotas: dict[bytes, tuple[int, int, float, float]] = {}
        self._segments: dict[int, SegmentEntry] = {}
        self._free: set[Address] = set()
        self._reserved: dict[Address, ReservedEntry] = {}
        self._graced: dict[Address, float] = {}
        self._pages: dict[tuple[bytes, bytes], PageEntry] = {}
        self._capacity_bytes = 0
        self._segment_bytes = 0

    def add(self, answer: Sequence[Any]) -> bool:
        """Returns True if it was the last part. Raises CorruptError where records contradict
        each other."""
        is_last, segments, spaces, timer_count, (capacity, segment_bytes), quotas = answer
        is_all = bool(is_last) and self.last_segment < 0
        for segment in segments:
            self._add_segment(*segment)
        counts = {namespace: sums[:2] for namespace, sums in pairs(spaces)}
        self._recalls = {namespace: _LEARNED.unpack(sums[2]) for namespace, sums in pairs(spaces)}
        self._quotas = {owner: _QUOTA.unpack(packed) for owner, packed in pairs(quotas)}
        self._capacity_bytes, self._segment_bytes = int(capacity), int(segment_bytes)
        if is_all:  # only then all of it is of one moment
            self._check_counts(counts, timer_count)
        return bool(is_last)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            capacity_bytes=self._capacity_bytes,
            segment_bytes=self._segment_bytes,
            namespaces=frozenset(self._recalls),
            segments=self._segments,
            free=frozenset(self._free),
            reserved=self._reserved,
            graced=self._graced,
            pages=self._pages,
            recalls=self._recalls,
            quotas=self._quotas,
        )

    def _add_segment(
        self,
        name: bytes,
        packed: bytes,
        bits: bytes,
        busy: Sequence[bytes],
        pages: Sequence[tuple[bytes, bytes, int]],
    ) -> None:
        number = self.last_segment = int(name)
        entry = self._segments[number] = unpack_segment(packed)
        self._free |= {Address(number, slot) for slot in _ones(bits)}
        for slot, row in pairs(busy):
            self._add_busy(Address(number, int(slot)), row)
        for key, page, is_filed in pages:
            if not is_filed:
                raise CorruptError("catalog.contradiction", "a page has no age", key=key.hex())
            segment, slot, generation, *rest = _PAGE.unpack(page)
            self._pages[entry.namespace, key] = PageEntry(Address(segment, slot), generation, *rest)

    def _add_busy(self, address: Address, row: bytes) -> None:
        if row[:1] == b"G":
            (self._graced[address],) = LEASE.unpack(row[1:])
            return
        _, generation, lease_end_s, key = _RESERVED.unpack_from(row)
        slices = row[_RESERVED.size :]
        self._reserved[address] = ReservedEntry(
            generation,
            lease_end_s,
            None if key == NO_KEY else key,
            frozenset(index for index, mark in enumerate(slices) if mark == ord("1")),
        )

    def _check_counts(self, spaces: dict[bytes, Sequence[int]], timer_count: int) -> None:
        """What lies in the tables is what was found by segment."""
        for namespace, (page_count, cold_count) in spaces.items():
            found_count = sum(owner == namespace for owner, _ in self._pages)
            if not page_count == cold_count == found_count:
                raise CorruptError(
                    "catalog.contradiction",
                    "pages and their places disagree",
                    counts=(page_count, cold_count, found_count),
                )
        busy_count = len(self._reserved) + len(self._graced)
        if timer_count != busy_count:
            raise CorruptError(
                "catalog.contradiction",
                "reserved slots and their ends disagree",
                counts=(timer_count, busy_count),
            )


def _ones(bits: bytes) -> list[int]:
    return [
        index * 8 + bit
        for index, value in enumerate(bits)
        for bit in range(8)
        if value & (0x80 >> bit)
    ]
