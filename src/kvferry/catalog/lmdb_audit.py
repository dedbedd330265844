"""Everything that an embedded catalog says, and whether its tables agree with each other."""

from collections import Counter
from collections.abc import Iterator

from kvferry.catalog.base import Share
from kvferry.catalog.lmdb_environment import Tables
from kvferry.catalog.lmdb_records import (
    GRACE,
    LEASE,
    META_KEY,
    NO_KEY,
    Meta,
    PageRow,
    ReservedRow,
    SpaceRow,
    Timer,
    cold_key,
    free_key,
    unpack_address,
    unpack_free,
    unpack_number,
    unpack_published,
    unpack_quota,
    unpack_segment,
)
from kvferry.catalog.snapshot import PageEntry, ReservedEntry, Snapshot
from kvferry.errors import CorruptError
from kvferry.layout import Address


class Audit:
    """All tables of one transaction, decoded."""

    def __init__(self, tables: Tables):
        self._meta = Meta.unpack(tables.meta.get(META_KEY))
        self._spaces = {key: SpaceRow.unpack(key, value) for key, value in tables.spaces.scan()}
        self._shares = {
            Share(key[:32], key[32:]): unpack_number(value) for key, value in tables.shares.scan()
        }
        self._quotas = {owner: unpack_quota(value) for owner, value in tables.quotas.scan()}
        self._segments = {
            unpack_number(key): unpack_segment(unpack_number(key), value)
            for key, value in tables.segments.scan()
        }
        slots = {unpack_address(key): value for key, value in tables.slots.scan()}
        self._reserved = {
            address: row
            for address, value in slots.items()
            if (row := ReservedRow.unpack(value)) is not None
        }
        self._published = {
            address: unpack_published(value)
            for address, value in slots.items()
            if address not in self._reserved
        }
        self._free_keys = {key for key, _ in tables.free.scan()}
        self._timers = {Timer.unpack(key) for key, _ in tables.timers.scan()}
        self._pages = {key: PageRow.unpack(value) for key, value in tables.pages.scan()}
        self._cold_keys = {key for key, _ in tables.cold.scan()}

    def snapshot(self) -> Snapshot:
        """Raises CorruptError where the tables contradict each other."""
        wrong = [*self._wrong_pages(), *self._wrong_slots(), *self._wrong_figures()]
        if wrong:
            raise CorruptError("catalog.inconsistent", "; ".join(wrong[:10]))
        numbers = {row.number: namespace for namespace, row in self._spaces.items()}
        return Snapshot(
            capacity_bytes=self._meta.capacity_bytes,
            segment_bytes=self._meta.segment_bytes,
            namespaces=frozenset(self._spaces),
            segments={number: heat.entry for number, heat in self._segments.items()},
            free=frozenset(map(unpack_free, self._free_keys)),
            reserved={address: _reserved_entry(row) for address, row in self._reserved.items()},
            graced=self._graced(),
            pages={
                (numbers[unpack_number(key[32:])], key[:32]): _page_entry(row)
                for key, row in self._pages.items()
            },
            recalls={namespace: tuple(row.recall) for namespace, row in self._spaces.items()},
            quotas={owner: tuple(row) for owner, row in self._quotas.items()},
        )

    def _share(self, segment: int) -> int | None:
        return self._shares.get(self._segments[segment].share)

    def _graced(self) -> dict[Address, float]:
        return {Address(t.segment, t.slot): t.moment_s for t in self._timers if t.kind == GRACE}

    def _wrong_pages(self) -> Iterator[str]:
        numbers = {row.number for row in self._spaces.values()}
        if any(unpack_number(key[32:]) not in numbers for key in self._pages):
            yield "pages of an unknown space"
        if any(heat.share not in self._shares for heat in self._segments.values()):
            yield "segments of an unknown share"
            return
        expected = {cold_key(self._share(row.segment), row) for row in self._pages.values()}
        if expected != self._cold_keys:
            yield f"{len(expected ^ self._cold_keys)} pages and entries of the order differ"
        if {row.address: key[:32] for key, row in self._pages.items()} != self._published:
            yield "pages and slots differ"

    def _wrong_slots(self) -> Iterator[str]:
        leases = {Timer(r.lease_end_s, LEASE, *a) for a, r in self._reserved.items()}
        if leases != {timer for timer in self._timers if timer.kind == LEASE}:
            yield "reservations and their timers differ"
        for key in self._free_keys:
            number = unpack_free(key).segment
            share = self._share(number) if number in self._segments else None
            if share is None or key != free_key(share, unpack_free(key)):
                yield f"{unpack_free(key)} is free in a share that is not its segment's"

    def _wrong_figures(self) -> Iterator[str]:
        pages = Counter(row.segment for row in self._pages.values())
        reserved = Counter(address.segment for address in self._reserved)
        graced = Counter(address.segment for address in self._graced())
        ages: Counter[int] = Counter()
        for row in self._pages.values():
            ages[row.segment] += row.age
        for number, heat in self._segments.items():
            counted = (pages[number], reserved[number], graced[number], ages[number])
            said = (heat.page_count, heat.reserved_count, heat.graced_count, heat.age_sum)
            if counted != said:
                yield f"segment {number} says {said}, has {counted}"


def _reserved_entry(row: ReservedRow) -> ReservedEntry:
    slices = frozenset(i for i in range(row.slices.bit_length()) if row.slices >> i & 1)
    key = None if row.key == NO_KEY else row.key
    return ReservedEntry(row.generation, row.lease_end_s, key, slices)


def _page_entry(row: PageRow) -> PageEntry:
    return PageEntry(row.address, row.generation, row.age, row.chunk_index, row.parent, row.uses)
