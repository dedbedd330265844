"""The rules of the catalog over the tables of LMDB, inside one transaction.

What `memory_book` finds by looking at all is kept here as an index (`cold`, `free`, `timers`) or a
figure (those of `SegmentHeat`). A verb does what `base.Catalog` says of the verb of that name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add

from kvferry.catalog import lmdb_figures
from kvferry.catalog.base import (
    AGE_STEP_S,
    CREATION_S,
    SPACE_IDLE_S,
    CatalogStats,
    Commit,
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
)
from kvferry.catalog.eviction import Head, more_uses
from kvferry.catalog.lmdb_environment import Tables
from kvferry.catalog.lmdb_eviction import LmdbEviction
from kvferry.catalog.lmdb_records import (
    ABSENT_PAGE,
    GRACE,
    LEASE,
    META_KEY,
    NO_AGE,
    NO_KEY,
    Meta,
    PageRow,
    ReservedRow,
    Timer,
    address_key,
    cold_key,
    free_key,
    number_key,
    pack_age,
    pack_published,
    pack_segment,
    packed_age,
    packed_hit,
    page_suffix,
    unpack_free,
    unpack_number,
    unpack_published,
    unpack_segment,
)
from kvferry.catalog.lmdb_spaces import LmdbSpaces
from kvferry.catalog.lookup_counts import Counts
from kvferry.catalog.quotas import Ledger, QuotaRow
from kvferry.catalog.snapshot import SegmentState
from kvferry.catalog.sweeping import SegmentHeat, lapse, make_room
from kvferry.errors import ExhaustedError
from kvferry.layout import Address


class LmdbBook:
    """The accounting of one store in one transaction, for one verb. `flush` writes what the verb
    has kept back.

    `host_now_s`: the host's time. `mint`: gives that many random bytes.
    """

    def __init__(
        self,
        tables: Tables,
        host_now_s: float,
        grace_s: float,
        mint: Callable[[int], bytes],
        policy: Policy,
    ):
        self._tables = tables
        self._grace_s = grace_s
        self._mint = mint
        self._meta = Meta.unpack(tables.meta.get(META_KEY))
        self._now_s = max(self._meta.last_s, host_now_s + self._meta.offset_s)
        self._age = int(self._now_s // AGE_STEP_S)
        self._eviction = LmdbEviction(tables, policy, self._segments_max())
        self._spaces = LmdbSpaces(tables, self._now_s)
        self._segments: dict[int, SegmentHeat | None] = {}
        self._packed: dict[int, bytes | None] = {}  # the same, as they were
        self._heats: list[SegmentHeat] | None = None
        self._counts: Counter[str] = Counter()  # by fields of `Meta`

    def count_lookups(self, counts: Counts) -> None:
        """Before the verb, which may forget a namespace."""
        self._meta = lmdb_figures.add_lookups(self._tables, self._meta, counts)

    def flush(self) -> None:
        """Writes counters, the time, and the figures of the segments that were touched."""
        for number, heat in self._segments.items():
            if heat is not None and (packed := pack_segment(heat)) != self._packed.get(number):
                self._tables.segments.put(number_key(number), packed)
        self._spaces.flush()
        sums = {name: getattr(self._meta, name) + count for name, count in self._counts.items()}
        self._tables.meta.put(META_KEY, self._meta._replace(last_s=self._now_s, **sums).pack())

    # Rows.

    def _segment(self, number: int) -> SegmentHeat | None:
        if number not in self._segments:
            packed = self._packed[number] = self._tables.segments.get(number_key(number))
            self._segments[number] = packed and unpack_segment(number, packed)
        return self._segments[number]

    def _page(self, namespace: bytes, key: bytes) -> PageRow | None:
        space = self._spaces.get(namespace)
        packed = space and self._tables.pages.get(key + page_suffix(space.number))
        return packed and PageRow.unpack(packed)

    def _reserved(self, address: Address) -> ReservedRow | None:
        packed = self._tables.slots.get(address_key(address))
        return packed and ReservedRow.unpack(packed)

    # Namespaces and pages.

    def is_attached(self, space: Space) -> bool:
        return self._spaces.is_attached(space)

    def attach(self, space: Space) -> None:
        if self._spaces.attach(space, self._meta.next_space):
            self._meta = self._meta._replace(next_space=self._meta.next_space + 1)

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """A `PACKED_HIT` for each key. Only C code runs for each: iterators inside each other."""
        return list(map(packed_hit, self._page_values(namespace, keys)))

    def _page_values(self, namespace: bytes, keys: Sequence[bytes]) -> Iterator[bytes]:
        row = self._spaces.get(namespace)
        if row is None:
            return repeat(ABSENT_PAGE, len(keys))
        row_keys = map(add, keys, repeat(page_suffix(row.number)))
        return self._tables.page_values(row_keys, ABSENT_PAGE)

    def stale(self, namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Those whose pages `touch` would change."""
        fresh = (pack_age(self._age), NO_AGE)
        ages = list(map(packed_age, self._page_values(namespace, keys)))
        return [key for key, age in zip(keys, ages, strict=True) if age not in fresh]

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._lift(namespace, key, 1, is_use=True)

    def _lift(self, namespace: bytes, key: bytes, uses: int, *, is_use: bool) -> None:
        """As `memory_book` has it."""
        while page := self._page(namespace, key):
            if page.age == self._age and page.uses >= uses:
                return
            space = self._spaces.get(namespace).number
            self._tables.cold.delete(cold_key(self._share(page.segment), page))
            self._segment(page.segment).age_sum += self._age - page.age
            own_uses = more_uses(page.uses) if is_use and page.age < self._age else page.uses
            uses = max(own_uses, uses)
            self._write_page(space, key, page._replace(age=self._age, uses=uses))
            key = page.parent

    def _write_page(self, space: int, key: bytes, page: PageRow) -> None:
        self._tables.pages.put(key + page_suffix(space), page.pack())
        self._tables.cold.put(cold_key(self._share(page.segment), page))

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        before_count = self._counts["evicted_count"]
        for key, generation in pages:
            page = self._page(namespace, key)
            if page is not None and page.generation == generation:
                self._remove_page(namespace, key, page)
                self._start_grace(page.address, self._now_s + self._grace_s)
        return self._counts["evicted_count"] - before_count

    def _remove_page(self, namespace: bytes, key: bytes, page: PageRow) -> None:
        space = self._spaces.get(namespace).number
        self._tables.pages.delete(key + page_suffix(space))
        self._tables.cold.delete(cold_key(self._share(page.segment), page))
        self._tables.slots.delete(address_key(page.address))
        heat = self._segment(page.segment)
        heat.page_count -= 1
        heat.age_sum -= page.age
        self._counts["evicted_count"] += 1

    # Slots.

    def reserve(self, share: Share, count: int, lease_s: float) -> list[Slot]:
        minted = self._mint(16 * count)
        self._spaces.known(share.namespace)
        number = self._spaces.share(share)
        found = [] if number is None else self._tables.free.scan(number_key(number), count)
        lease_end_s = self._now_s + lease_s
        slots = []
        for index, (key, _) in enumerate(found):
            slot = Slot(unpack_free(key), minted[16 * index : 16 * index + 16])
            self._tables.free.delete(key)
            row = ReservedRow(slot.generation, lease_end_s, NO_KEY, 0)
            self._tables.slots.put(address_key(slot.address), row.pack())
            self._tables.timers.put(Timer(lease_end_s, LEASE, *slot.address).pack())
            self._segment(slot.address.segment).reserved_count += 1
            slots.append(slot)
        return slots

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        return [self._commit(namespace, commit) for commit in commits]

    def _commit(self, namespace: bytes, commit: Commit) -> Verdict:
        page = self._page(namespace, commit.key)
        if page is not None and page.generation == commit.slot.generation:
            return Verdict.PUBLISHED
        row = self._standing(namespace, commit)
        is_complete = row is not None and self._add_slices(namespace, row, commit)
        if page is not None:
            self._lift(namespace, commit.parent, page.uses, is_use=False)
            if is_complete:
                self._end_reservation(commit.slot.address, row)
                self._free(commit.slot.address)
                self._counts["duplicate_count"] += 1
            return Verdict.DUPLICATE
        if row is None:
            return Verdict.EXPIRED
        if not is_complete:
            return Verdict.PARTIAL
        self._end_reservation(commit.slot.address, row)
        self._publish(namespace, Page(commit.key, commit.parent, commit.chunk_index, *commit.slot))
        self._counts["published_count"] += 1
        return Verdict.PUBLISHED

    def _standing(self, namespace: bytes, commit: Commit) -> ReservedRow | None:
        """The reservation that a commit is about, if it still stands."""
        address, generation = commit.slot
        row = self._reserved(address)
        if row is None or row.generation != generation or row.lease_end_s <= self._now_s:
            return None
        heat = self._segment(address.segment)
        stands = (
            row.key in (NO_KEY, commit.key)
            and heat.share.namespace == namespace
            and heat.state is SegmentState.READY
        )
        return row if stands else None

    def _add_slices(self, namespace: bytes, row: ReservedRow, commit: Commit) -> bool:
        """Notes what is on storage. True if that is the whole page."""
        slice_count = self._spaces.get(namespace).space.slice_count
        slices = row.slices
        for index in check_slices(commit, slice_count):
            slices |= 1 << index
        row = row._replace(key=commit.key, slices=slices)
        self._tables.slots.put(address_key(commit.slot.address), row.pack())
        return slices == (1 << slice_count) - 1

    def _end_reservation(self, address: Address, row: ReservedRow) -> None:
        self._tables.slots.delete(address_key(address))
        self._tables.timers.delete(Timer(row.lease_end_s, LEASE, *address).pack())
        self._segment(address.segment).reserved_count -= 1

    def _publish(self, namespace: bytes, page: Page) -> None:
        space, uses = self._eviction.recall(self._spaces.get(namespace), page.key)
        self._spaces.learn(space)
        row = PageRow(
            *page.address, page.generation, self._age, page.chunk_index, page.parent, uses
        )
        self._write_page(space.number, page.key, row)
        self._tables.slots.put(address_key(page.address), pack_published(page.key))
        heat = self._segment(page.address.segment)
        heat.page_count += 1
        heat.age_sum += self._age
        self._lift(namespace, page.parent, uses, is_use=False)

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        for address, generation in slots:
            row = self._reserved(address)
            if row is not None and row.generation == generation:
                self._end_reservation(address, row)
                self._start_grace(address, self._now_s + self._grace_s)

    def _start_grace(self, address: Address, end_s: float) -> None:
        self._tables.timers.put(Timer(end_s, GRACE, *address).pack())
        self._segment(address.segment).graced_count += 1

    def _free(self, address: Address) -> None:
        self._tables.free.put(free_key(self._share(address.segment), address))

    def _share(self, segment: int) -> int:
        return self._spaces.share(self._segment(segment).share)

    # Segments.

    def grow(self, share: Share) -> int | Refused:
        space = self._spaces.known(share.namespace).space
        ledger = Ledger(self.quotas(), self._segments_max(), self._now_s)
        for heat in self.heats():
            ledger.add(heat.share)
        if refusal := ledger.refusal(share):
            self._counts["quota_refused_count"] += refusal is Refused.QUOTA
            return refusal
        number = self._meta.next_segment
        self._add_segment(number, share, SegmentState.CREATING, space.slot_count)
        return number

    def grown(self, segment: int) -> bool:
        heat = self._segment(segment)
        if heat is None or heat.state is SegmentState.EMPTIED:
            return False
        if heat.state is SegmentState.CREATING:
            self._add_segment(segment, heat.share, SegmentState.READY, heat.slot_count)
        return True

    def shrunk(self, segment: int) -> None:
        if self._segment(segment) is None:
            return
        self.empty(segment)
        for key, _ in self._tables.slots.scan(number_key(segment)):
            self._tables.slots.delete(key)
        if self._segment(segment).reserved_count or self._segment(segment).graced_count:
            for key, _ in self._tables.timers.scan():
                if Timer.unpack(key).segment == segment:
                    self._tables.timers.delete(key)
        self._tables.segments.delete(number_key(segment))
        self._segments[segment] = None

    def adopt(self, segment: int, share: Share, pages: Sequence[Page]) -> int:
        space = self._spaces.known(share.namespace).space
        if self._segment(segment) is not None:
            return 0
        if self._tables.segments.count() >= self._segments_max():
            raise ExhaustedError(
                "catalog.capacity", "the budget does not hold this segment", segment=segment
            )
        self._add_segment(segment, share, SegmentState.READY, space.slot_count)
        return sum(self._adopt(share.namespace, page, segment) for page in pages)

    def _adopt(self, namespace: bytes, page: Page, segment: int) -> bool:
        if page.address.segment != segment or self._page(namespace, page.key) is not None:
            return False
        if not self._tables.free.delete(free_key(self._share(segment), page.address)):
            return False
        self._publish(namespace, page)
        return True

    def _add_segment(self, number: int, share: Share, state: SegmentState, slot_count: int) -> None:
        if self._spaces.add_share(share, self._meta.next_share):
            self._meta = self._meta._replace(next_share=self._meta.next_share + 1)
        until_s = self._now_s + CREATION_S
        heat = SegmentHeat(number, share, state, until_s, slot_count, 0, 0, 0, 0)
        self._segments[number] = heat
        self._tables.segments.put(number_key(number), pack_segment(heat))
        next_segment = max(self._meta.next_segment, number + 1)
        self._meta = self._meta._replace(next_segment=next_segment)
        if state is SegmentState.READY:
            for slot in range(slot_count):
                self._free(Address(number, slot))

    def _segments_max(self) -> int:
        return self._meta.capacity_bytes // self._meta.segment_bytes

    # Sweeping.

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        evicted_before_count = self._counts["evicted_count"]
        expired_count = self._end_timers()
        self._end_creations()
        self._forget_spaces()
        lapsed_count = lapse(self, self._now_s)
        quota_count = make_room(self, self._now_s, self._segments_max(), wanted, can_grow)
        self._counts["expired_count"] += expired_count
        self._counts["quota_evicted_count"] += quota_count
        self._counts["lapsed_count"] += lapsed_count
        evicted_count = self._counts["evicted_count"] - evicted_before_count
        deletable = tuple(self._deletable())
        return Swept(expired_count, evicted_count, deletable, quota_count, lapsed_count)

    def _end_timers(self) -> int:
        """Ends leases and grace times that are over; returns how many leases."""
        lease_count = 0
        while (found := self._tables.timers.first()) is not None:
            timer = Timer.unpack(found[0])
            if timer.moment_s > self._now_s:
                break
            address = Address(timer.segment, timer.slot)
            if timer.kind == LEASE:
                self._end_reservation(address, self._reserved(address))
                self._start_grace(address, timer.moment_s + self._grace_s)
                lease_count += 1
            else:
                self._tables.timers.delete(found[0])
                self._end_grace(address)
        return lease_count

    def _end_grace(self, address: Address) -> None:
        heat = self._segment(address.segment)
        heat.graced_count -= 1
        if heat.state is SegmentState.READY:
            self._free(address)

    def _end_creations(self) -> None:
        for heat in self.heats():
            if heat.state is SegmentState.CREATING and heat.until_s <= self._now_s:
                heat.state = SegmentState.EMPTIED
                heat.until_s = self._now_s

    def _forget_spaces(self) -> None:
        in_use = {heat.share.namespace for heat in self.heats()}
        for row in self._spaces.all():
            namespace = row.space.namespace
            if namespace not in in_use and row.attached_s <= self._now_s - SPACE_IDLE_S:
                self._spaces.forget(namespace)
                self._eviction.forget(row)
                lmdb_figures.forget_lookups(self._tables, namespace)

    def _deletable(self) -> Iterable[int]:
        """Emptied segments that nobody may still write to or read from."""
        for heat in self.heats():
            is_unused = heat.reserved_count == heat.graced_count == 0
            if heat.state is SegmentState.EMPTIED and heat.until_s <= self._now_s and is_unused:
                yield heat.number

    # What `sweeping` asks.

    def heats(self) -> list[SegmentHeat]:
        if self._heats is None:
            numbers = [unpack_number(key) for key, _ in self._tables.segments.scan()]
            self._heats = [self._segment(number) for number in numbers]
        return self._heats

    def slots_per_segment(self, namespace: bytes) -> int | None:
        row = self._spaces.get(namespace)
        return row and row.space.slot_count

    def coldest_age(self, share: Share) -> int | None:
        head = self._coldest(share)
        return head and head.age

    def lapse(self, share: Share, age_max: int, count_max: int) -> int:
        number, count = self._spaces.share(share), 0
        while count < count_max and (head := self._eviction.oldest(number)):
            if head.age > age_max:
                break
            self._evict_at(share.namespace, head.address)
            count += 1
        return count

    def evict_coldest(self, share: Share) -> None:
        key, uses = self._evict_at(share.namespace, self._coldest(share).address)
        row = self._spaces.get(share.namespace)
        self._spaces.learn(self._eviction.remember(row, key, uses))

    def _evict_at(self, namespace: bytes, address: Address) -> tuple[bytes, int]:
        """Returns the page's key and uses."""
        key = unpack_published(self._tables.slots.get(address_key(address)))
        page = self._page(namespace, key)
        self._remove_page(namespace, key, page)
        self._start_grace(address, self._now_s + self._grace_s)
        return key, page.uses

    def _coldest(self, share: Share) -> Head | None:
        row, number = self._spaces.get(share.namespace), self._spaces.share(share)
        return self._eviction.coldest(row, number, self._age)

    def quotas(self) -> Mapping[bytes, QuotaRow]:
        return self._spaces.quotas()

    def claim(self, owner: bytes, until_s: float) -> None:
        self._spaces.claim(owner, until_s)

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        self._spaces.set_quotas(quotas)

    def empty(self, segment: int) -> None:
        """Reserved slots stay their writers' until the leases end, but are not published."""
        heat = self._segment(segment)
        namespace, share = heat.share.namespace, self._share(segment)
        for _, packed in self._tables.slots.scan(number_key(segment)):
            if ReservedRow.unpack(packed) is None:
                page_key = unpack_published(packed)
                self._remove_page(namespace, page_key, self._page(namespace, page_key))
        for key, _ in self._tables.free.scan(number_key(share) + number_key(segment)):
            self._tables.free.delete(key)
        heat.state = SegmentState.EMPTIED
        heat.until_s = self._now_s + self._grace_s

    # Figures.

    def hottest(self, namespace: bytes, count: int) -> list[HotPage]:
        row, shares = self._spaces.get(namespace), self._spaces.shares(namespace)
        return lmdb_figures.hottest(self._tables, row, shares, self._age, count) if row else []

    def stats(self) -> CatalogStats:
        spaces = [row.space for row in self._spaces.all()]
        return lmdb_figures.stats(self._tables, self._meta, self.heats(), spaces)
