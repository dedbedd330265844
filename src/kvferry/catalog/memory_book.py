"""The rules of the catalog in readable form: the reference, and the model in tests.

Everything is a dictionary, and what a real catalog finds by an index is found here by looking at
all. A verb does what `base.Catalog` says of the verb of that name.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.catalog.base import (
    AGE_STEP_S,
    ATTACH_STEP_S,
    CREATION_S,
    HOTTEST_MAX,
    SPACE_IDLE_S,
    CatalogStats,
    Commit,
    Hit,
    HotPage,
    Page,
    Policy,
    Quota,
    Refused,
    Share,
    Slot,
    Space,
    Swept,
    Verdict,
    Want,
    check_slices,
    check_space,
    counted,
    unknown_namespace,
)
from kvferry.catalog.eviction import Head, more_uses
from kvferry.catalog.memory_eviction import MemoryEviction
from kvferry.catalog.quotas import Ledger, QuotaRow, renewed
from kvferry.catalog.snapshot import (
    PageEntry,
    ReservedEntry,
    SegmentEntry,
    SegmentState,
    Snapshot,
)
from kvferry.catalog.sweeping import SegmentHeat, lapse, make_room, share_stats, space_stats
from kvferry.clock import Clock
from kvferry.errors import ExhaustedError
from kvferry.layout import Address


@dataclass
class _Segment:
    """See `snapshot.SegmentEntry`."""

    share: Share
    state: SegmentState
    until_s: float
    slot_count: int


@dataclass
class _Reservation:
    """A slot while a writer may write to it."""

    namespace: bytes
    generation: bytes
    lease_end_s: float
    key: bytes | None = None
    slices: set[int] = field(default_factory=set)


@dataclass
class _Page:
    """A published page."""

    address: Address
    generation: bytes
    age: int
    chunk_index: int
    parent: bytes
    uses: int


class MemoryBook:
    """The accounting of one store. Not safe for threads: `MemoryCatalog` locks."""

    def __init__(self, clock: Clock, grace_s: float, segment_bytes: int, policy: Policy):
        self.capacity_bytes = 0
        self.segment_bytes = segment_bytes
        self._clock = clock
        self._grace_s = grace_s
        self._next_segment = 0
        self._spaces: dict[bytes, Space] = {}
        self._attached_s: dict[bytes, float] = {}
        self._segments: dict[int, _Segment] = {}
        self._free: set[Address] = set()
        self._reserved: dict[Address, _Reservation] = {}
        self._graced: dict[Address, float] = {}
        self._pages: dict[tuple[bytes, bytes], _Page] = {}
        self._eviction = MemoryEviction(policy)
        self._quotas: dict[bytes, QuotaRow] = {}
        self._counts: Counter[str] = Counter()
        self._lookups: dict[bytes, tuple[int, int]] = {}  # and hits, by namespace

    # Namespaces and pages.

    def attach(self, space: Space) -> None:
        check_space(self._spaces.setdefault(space.namespace, space), space)
        self._eviction.attach(space.namespace)
        now_s = self._clock.now_s()
        if now_s >= self._attached_s.setdefault(space.namespace, now_s) + ATTACH_STEP_S:
            self._attached_s[space.namespace] = now_s

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Hit | None]:
        pages = [self._pages.get((namespace, key)) for key in keys]
        lookups, hits = self._lookups.get(namespace, (0, 0))
        hits += sum(page is not None for page in pages)
        self._lookups[namespace] = lookups + len(keys), hits
        self._counts["lookup"] += len(keys)
        self._counts["hit"] += sum(page is not None for page in pages)
        return [page and Hit(page.address, page.generation) for page in pages]

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return [(namespace, key) in self._pages for key in keys]

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._lift(namespace, key, 1, is_use=True)

    def _lift(self, namespace: bytes, key: bytes, uses: int, *, is_use: bool) -> None:
        """Marks a page and its ancestors as used now, and at least `uses` times. `is_use`: once
        more than before."""
        age = self._age()
        while page := self._pages.get((namespace, key)):
            if page.age == age and page.uses >= uses:
                return
            if page.age < age and is_use:
                page.uses = more_uses(page.uses)
            page.age, page.uses = age, max(page.uses, uses)
            key, uses = page.parent, page.uses

    def _age(self) -> int:
        return int(self._clock.now_s() // AGE_STEP_S)

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        return sum(self._evict(namespace, key, generation) for key, generation in pages)

    def _evict(self, namespace: bytes, key: bytes, generation: bytes) -> bool:
        page = self._pages.get((namespace, key))
        if page is None or page.generation != generation:
            return False
        del self._pages[namespace, key]
        self._graced[page.address] = self._clock.now_s() + self._grace_s
        self._counts["evicted"] += 1
        return True

    # Slots.

    def reserve(self, share: Share, count: int, lease_s: float) -> list[Slot]:
        minted = self._clock.random_bytes(16 * count)
        self._space(share.namespace)
        addresses = sorted(a for a in self._free if self._share(a) == share)[:count]
        slots = [Slot(a, minted[16 * i : 16 * i + 16]) for i, a in enumerate(addresses)]
        lease_end_s = self._clock.now_s() + lease_s
        for slot in slots:
            self._free.remove(slot.address)
            self._reserved[slot.address] = _Reservation(
                share.namespace, slot.generation, lease_end_s
            )
        return slots

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        return [self._commit(namespace, commit) for commit in commits]

    def _commit(self, namespace: bytes, commit: Commit) -> Verdict:
        page = self._pages.get((namespace, commit.key))
        if page is not None and page.generation == commit.slot.generation:
            return Verdict.PUBLISHED
        reservation = self._standing(namespace, commit)
        is_complete = reservation is not None and self._add_slices(reservation, commit)
        if is_complete:
            del self._reserved[commit.slot.address]
        if page is not None:
            self._lift(namespace, commit.parent, page.uses, is_use=False)
            if is_complete:
                self._free.add(commit.slot.address)
                self._counts["duplicate"] += 1
            return Verdict.DUPLICATE
        if reservation is None:
            return Verdict.EXPIRED
        if not is_complete:
            return Verdict.PARTIAL
        self._publish(namespace, Page(commit.key, commit.parent, commit.chunk_index, *commit.slot))
        self._counts["published"] += 1
        return Verdict.PUBLISHED

    def _standing(self, namespace: bytes, commit: Commit) -> _Reservation | None:
        """The reservation that a commit is about, if it still stands."""
        address, generation = commit.slot
        reservation = self._reserved.get(address)
        stands = (
            reservation is not None
            and reservation.namespace == namespace
            and reservation.generation == generation
            and reservation.lease_end_s > self._clock.now_s()
            and reservation.key in (None, commit.key)
            and self._segments[address.segment].state is SegmentState.READY
        )
        return reservation if stands else None

    def _add_slices(self, reservation: _Reservation, commit: Commit) -> bool:
        """Notes what is on storage. True if that is the whole page."""
        slice_count = self._spaces[reservation.namespace].slice_count
        reservation.slices.update(check_slices(commit, slice_count))
        reservation.key = commit.key
        return len(reservation.slices) == slice_count

    def _publish(self, namespace: bytes, page: Page) -> None:
        uses = more_uses(self._eviction.recall(namespace, page.key, self._slots_max(namespace)))
        self._pages[namespace, page.key] = _Page(
            page.address, page.generation, self._age(), page.chunk_index, page.parent, uses
        )
        self._lift(namespace, page.parent, uses, is_use=False)

    def _slots_max(self, namespace: bytes) -> int:
        return max(1, self._segments_max()) * self._spaces[namespace].slot_count

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        for address, generation in slots:
            reservation = self._reserved.get(address)
            if reservation is not None and reservation.generation == generation:
                del self._reserved[address]
                self._graced[address] = self._clock.now_s() + self._grace_s

    # Segments.

    def grow(self, share: Share) -> int | Refused:
        space = self._space(share.namespace)
        ledger = Ledger(self._quotas, self._segments_max(), self._clock.now_s())
        for segment in self._segments.values():
            ledger.add(segment.share)
        if refusal := ledger.refusal(share):
            self._counts[refusal.value] += 1
            return refusal
        number = self._next_segment
        self._add_segment(number, share, SegmentState.CREATING, space.slot_count)
        return number

    def grown(self, segment: int) -> bool:
        found = self._segments.get(segment)
        if found is None or found.state is SegmentState.EMPTIED:
            return False
        if found.state is SegmentState.CREATING:
            self._add_segment(segment, found.share, SegmentState.READY, found.slot_count)
        return True

    def shrunk(self, segment: int) -> None:
        if segment not in self._segments:
            return
        self.empty(segment)
        for records in (self._reserved, self._graced):
            for address in [a for a in records if a.segment == segment]:
                del records[address]
        del self._segments[segment]

    def adopt(self, segment: int, share: Share, pages: Sequence[Page]) -> int:
        space = self._space(share.namespace)
        if segment in self._segments:
            return 0
        if len(self._segments) >= self._segments_max():
            raise ExhaustedError(
                "catalog.capacity", "the budget does not hold this segment", segment=segment
            )
        self._add_segment(segment, share, SegmentState.READY, space.slot_count)
        return sum(self._adopt(share.namespace, page, segment) for page in pages)

    def _adopt(self, namespace: bytes, page: Page, segment: int) -> bool:
        fits = page.address in self._free and page.address.segment == segment
        if not fits or (namespace, page.key) in self._pages:
            return False
        self._free.remove(page.address)
        self._publish(namespace, page)
        return True

    def _add_segment(self, number: int, share: Share, state: SegmentState, slot_count: int) -> None:
        until_s = self._clock.now_s() + CREATION_S
        self._segments[number] = _Segment(share, state, until_s, slot_count)
        self._next_segment = max(self._next_segment, number + 1)
        if state is SegmentState.READY:
            self._free.update(Address(number, slot) for slot in range(slot_count))

    def _segments_max(self) -> int:
        return self.capacity_bytes // self.segment_bytes

    def _space(self, namespace: bytes) -> Space:
        if namespace not in self._spaces:
            raise unknown_namespace(namespace)
        return self._spaces[namespace]

    def _share(self, address: Address) -> Share:
        return self._segments[address.segment].share

    # Sweeping.

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        evicted_before_count = self._counts["evicted"]
        expired_count = self._end_leases()
        self._end_graces()
        self._end_creations()
        self._forget_spaces()
        now_s = self._clock.now_s()
        lapsed_count = lapse(self, now_s)
        quota_count = make_room(self, now_s, self._segments_max(), wanted, can_grow)
        self._counts["quota_evicted"] += quota_count
        self._counts["lapsed"] += lapsed_count
        evicted_count = self._counts["evicted"] - evicted_before_count
        deletable = self._deletable()
        return Swept(expired_count, evicted_count, deletable, quota_count, lapsed_count)

    def _end_leases(self) -> int:
        now_s = self._clock.now_s()
        over = {a: r for a, r in self._reserved.items() if r.lease_end_s <= now_s}
        for address, reservation in over.items():
            del self._reserved[address]
            self._graced[address] = reservation.lease_end_s + self._grace_s
        self._counts["expired"] += len(over)
        return len(over)

    def _end_graces(self) -> None:
        now_s = self._clock.now_s()
        for address in [a for a, until_s in self._graced.items() if until_s <= now_s]:
            del self._graced[address]
            if self._segments[address.segment].state is SegmentState.READY:
                self._free.add(address)

    def _end_creations(self) -> None:
        now_s = self._clock.now_s()
        for segment in self._segments.values():
            if segment.state is SegmentState.CREATING and segment.until_s <= now_s:
                segment.state = SegmentState.EMPTIED
                segment.until_s = now_s

    def _forget_spaces(self) -> None:
        in_use = {segment.share.namespace for segment in self._segments.values()}
        limit_s = self._clock.now_s() - SPACE_IDLE_S
        for namespace in self._spaces.keys() - in_use:
            if self._attached_s[namespace] <= limit_s:
                del self._spaces[namespace], self._attached_s[namespace]
                self._eviction.forget(namespace)
                self._lookups.pop(namespace, None)

    def _deletable(self) -> tuple[int, ...]:
        """Emptied segments that nobody may still write to or read from."""
        now_s = self._clock.now_s()
        return tuple(
            heat.number
            for heat in self.heats()
            if heat.state is SegmentState.EMPTIED
            and heat.until_s <= now_s
            and heat.reserved_count == heat.graced_count == 0
        )

    # What `sweeping` asks.

    def heats(self) -> list[SegmentHeat]:
        reserved = Counter(address.segment for address in self._reserved)
        graced = Counter(address.segment for address in self._graced)
        pages: Counter[int] = Counter()
        ages: Counter[int] = Counter()
        for page in self._pages.values():
            pages[page.address.segment] += 1
            ages[page.address.segment] += page.age
        return [
            SegmentHeat(
                number,
                segment.share,
                segment.state,
                segment.until_s,
                segment.slot_count,
                pages[number],
                reserved[number],
                graced[number],
                ages[number],
            )
            for number, segment in sorted(self._segments.items())
        ]

    def slots_per_segment(self, namespace: bytes) -> int | None:
        space = self._spaces.get(namespace)
        return space and space.slot_count

    def coldest_age(self, share: Share) -> int | None:
        head = self._coldest(share)
        return head and head.age

    def lapse(self, share: Share, age_max: int, count_max: int) -> int:
        old = sorted(
            (page.age, -page.chunk_index, page.address, key)
            for key, page in self._pages_of(share.namespace)
            if self._share(page.address) == share and page.age <= age_max
        )
        for *_, key in old[:count_max]:
            self._evict(share.namespace, key, self._pages[share.namespace, key].generation)
        return min(len(old), count_max)

    def evict_coldest(self, share: Share) -> None:
        address, namespace = self._coldest(share).address, share.namespace
        pages = self._pages_of(namespace)
        key, page = next(pair for pair in pages if pair[1].address == address)
        self._evict(namespace, key, page.generation)
        self._eviction.remember(namespace, key, page.uses, self._slots_max(namespace))

    def _coldest(self, share: Share) -> Head | None:
        pages = (p for _, p in self._pages_of(share.namespace) if self._share(p.address) == share)
        return self._eviction.coldest(share.namespace, pages, self._age())

    def empty(self, segment: int) -> None:
        """Reserved slots stay their writers' until the leases end, but are not published."""
        for owner in [o for o, page in self._pages.items() if page.address.segment == segment]:
            del self._pages[owner]
            self._counts["evicted"] += 1
        self._free = {address for address in self._free if address.segment != segment}
        self._segments[segment].state = SegmentState.EMPTIED
        self._segments[segment].until_s = self._clock.now_s() + self._grace_s

    def quotas(self) -> dict[bytes, QuotaRow]:
        return self._quotas

    def claim(self, owner: bytes, until_s: float) -> None:
        self._quotas[owner] = self._quotas[owner]._replace(claimed_until_s=until_s)

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        self._quotas = renewed(self._quotas, quotas)

    def _pages_of(self, namespace: bytes) -> list[tuple[bytes, _Page]]:
        return [(key, page) for (owner, key), page in self._pages.items() if owner == namespace]

    # Figures.

    def stats(self) -> CatalogStats:
        heats = self.heats()
        return CatalogStats(
            capacity_bytes=self.capacity_bytes,
            segment_bytes=self.segment_bytes,
            segment_count=len(heats),
            spaces=tuple(
                counted(space_stats(space, heats), self._lookups)
                for _, space in sorted(self._spaces.items())
            ),
            lookup_key_count=self._counts["lookup"],
            hit_key_count=self._counts["hit"],
            published_count=self._counts["published"],
            duplicate_count=self._counts["duplicate"],
            expired_count=self._counts["expired"],
            evicted_count=self._counts["evicted"],
            shares=share_stats(heats, list(self._spaces.values())),
            quota_refused_count=self._counts[Refused.QUOTA.value],
            quota_evicted_count=self._counts["quota_evicted"],
            lapsed_count=self._counts["lapsed"],
        )

    def hottest(self, namespace: bytes, count: int) -> list[HotPage]:
        def heat(owned: tuple[bytes, _Page]) -> tuple[int, int, Address]:
            page = owned[1]
            return page.age, -page.chunk_index, page.address

        pages = sorted(self._pages_of(namespace), key=heat, reverse=True)
        return [
            HotPage(key, page.parent, page.chunk_index, self._age() - page.age)
            for key, page in pages[: min(count, HOTTEST_MAX)]
        ]

    def segments(self) -> dict[int, SegmentEntry]:
        return {heat.number: heat.entry for heat in self.heats()}

    def snapshot(self) -> Snapshot:
        return Snapshot(
            capacity_bytes=self.capacity_bytes,
            segment_bytes=self.segment_bytes,
            namespaces=frozenset(self._spaces),
            segments=self.segments(),
            free=frozenset(self._free),
            reserved={
                address: ReservedEntry(r.generation, r.lease_end_s, r.key, frozenset(r.slices))
                for address, r in self._reserved.items()
            },
            graced=dict(self._graced),
            pages={
                owner: PageEntry(p.address, p.generation, p.age, p.chunk_index, p.parent, p.uses)
                for owner, p in self._pages.items()
            },
            recalls=self._eviction.recalls(),
            quotas={owner: tuple(row) for owner, row in self._quotas.items()},
        )
