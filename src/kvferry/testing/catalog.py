"""What every catalog must do: subclass `CatalogSuite` and `CatalogSpaceSuite` (`catalog_space`) and
give them a `catalog`.

Each test leaves the catalog open; the fixture then checks what must be true of any catalog.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvferry.catalog.base import (
    AGE_STEP_S,
    DEFAULT_POLICY,
    GRACE_S,
    NO_TENANT,
    PACKED_HIT,
    SPACE_IDLE_S,
    Catalog,
    Commit,
    Hit,
    HotPage,
    Policy,
    Slot,
    Space,
    Verdict,
    Want,
)
from kvferry.catalog.snapshot import check_invariants
from kvferry.errors import (
    ClosedError,
    ConfigError,
    IncompatibleError,
    InternalError,
    UnavailableError,
)
from kvferry.layout import Address
from kvferry.testing.clock import ManualClock

STORE = b"s" * 16
SEGMENT_BYTES = 1 << 20
SEGMENTS_MAX = 4
CAPACITY_BYTES = SEGMENTS_MAX * SEGMENT_BYTES + 1000
LEASE_S = 30.0

A = Space(b"a" * 32, slot_count=4, slot_bytes=1000, slice_count=1, chunk_tokens=16, description="A")
B = Space(b"b" * 32, slot_count=3, slot_bytes=2000, slice_count=3, chunk_tokens=32, description="B")
ROOT = bytes(32)


def key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def chain(name: str, count: int) -> list[bytes]:
    """Keys of one prefix, its start first."""
    return [key(f"{name} {index}") for index in range(count)]


class Driver:
    """Says the usual sequences of verbs to one catalog."""

    def __init__(self, catalog: Catalog, clock: ManualClock):
        self.catalog = catalog
        self.clock = clock

    def grow(self, space: Space = A, count: int = 1, tenant: bytes = NO_TENANT) -> list[int]:
        numbers = [self.catalog.grow(space.namespace, tenant) for _ in range(count)]
        for number in numbers:
            assert self.catalog.grown(number)
        return numbers

    def reserve(
        self,
        count: int = 1,
        space: Space = A,
        lease_s: float = LEASE_S,
        tenant: bytes = NO_TENANT,
    ) -> list[Slot]:
        slots = self.catalog.reserve(space.namespace, count, lease_s, tenant)
        assert len(slots) == count
        return slots

    def store(
        self, keys: Sequence[bytes], space: Space = A, tenant: bytes = NO_TENANT
    ) -> list[Slot]:
        """Stores a chain, whole pages, in one call."""
        slots = self.reserve(len(keys), space, tenant=tenant)
        parents = [ROOT, *keys]
        commits = [
            Commit(keys[i], parents[i], i, slot, 0, space.slice_count)
            for i, slot in enumerate(slots)
        ]
        verdicts = self.catalog.commit(space.namespace, commits)
        assert verdicts == [Verdict.PUBLISHED] * len(keys)
        return slots

    def commit(self, name: bytes, slot: Slot, space: Space = A, slices: range | None = None):
        slices = slices or range(space.slice_count)
        commit = Commit(name, ROOT, 0, slot, slices.start, len(slices))
        return self.catalog.commit(space.namespace, [commit])[0]

    def present(self, keys: Sequence[bytes], space: Space = A) -> list[bool]:
        return [hit is not None for hit in self.catalog.lookup(space.namespace, keys)]

    def free_count(self, space: Space = A) -> int:
        """How many slots can be had, found by taking all and giving none back to anybody."""
        snapshot = self.catalog.snapshot()
        namespaces = {number: entry.namespace for number, entry in snapshot.segments.items()}
        return sum(namespaces[address.segment] == space.namespace for address in snapshot.free)


class CatalogFixtures:
    """What both suites stand on. A subclass overrides `catalog` (new, not open) and, where a
    catalog outlives its object, `again` (another object for the same records)."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def policy(self) -> Policy:
        return DEFAULT_POLICY

    @pytest.fixture
    def catalog(self, clock: ManualClock) -> Catalog:
        raise NotImplementedError

    @pytest.fixture
    def again(self, catalog: Catalog) -> Catalog:
        return catalog

    @pytest.fixture
    def driver(self, catalog: Catalog, clock: ManualClock) -> Iterator[Driver]:
        assert catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        catalog.attach(A)
        catalog.attach(B)
        yield Driver(catalog, clock)
        assert check_invariants(catalog.snapshot()) == []
        catalog.close()


class CatalogSuite(CatalogFixtures):
    """Conformance of a `Catalog`, first part: pages and slots."""

    # Opening.

    def test_what_is_known_outlives_a_restart(self, driver, catalog, again):
        driver.grow()
        driver.store(chain("x", 3))
        before, name = catalog.snapshot(), catalog.catalog_id
        catalog.close()
        assert not again.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        assert again.catalog_id == name
        assert again.snapshot() == before
        again.close()
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)

    def test_another_store_begins_with_nothing(self, driver, catalog):
        driver.grow()
        driver.store(chain("x", 3))
        name = catalog.catalog_id
        catalog.close()
        assert catalog.open(b"t" * 16, CAPACITY_BYTES, SEGMENT_BYTES)
        assert catalog.catalog_id != name
        assert catalog.snapshot().segments == {}
        catalog.attach(A)
        assert driver.present(chain("x", 3)) == [False] * 3

    def test_another_segment_size_is_refused(self, driver, catalog):
        catalog.close()
        with pytest.raises(ConfigError):
            catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES * 2)
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)

    def test_a_closed_catalog_says_so(self, catalog):
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        catalog.close()
        catalog.close()
        with pytest.raises(ClosedError):
            catalog.lookup(A.namespace, [key("x")])
        with pytest.raises(ClosedError):
            catalog.sweep()

    # Namespaces.

    def test_attaching_again_changes_nothing(self, driver, catalog):
        before = catalog.snapshot()
        catalog.attach(A)
        catalog.attach(replace(A, description="the same in other words"))
        assert catalog.snapshot() == before
        assert {s.description for s in catalog.stats().spaces} == {"A", "B"}

    @pytest.mark.parametrize("field", ["slot_count", "slot_bytes", "slice_count", "chunk_tokens"])
    def test_a_namespace_with_other_sizes_is_refused_by_name(self, driver, catalog, field):
        with pytest.raises(IncompatibleError, match=field):
            catalog.attach(replace(A, **{field: 7}))

    def test_an_unknown_namespace_asks_to_be_attached(self, driver, catalog):
        stranger = b"?" * 32
        assert catalog.lookup(stranger, [key("x")]) == [None]
        assert catalog.evict(stranger, [(key("x"), bytes(16))]) == 0
        catalog.touch(stranger, [key("x")])
        catalog.sweep([Want(stranger, 5)])
        for verb in (
            lambda: catalog.reserve(stranger, 1, LEASE_S),
            lambda: catalog.grow(stranger),
            lambda: catalog.adopt(9, stranger, []),
        ):
            with pytest.raises(UnavailableError, match="unknown_namespace"):
                verb()

    def test_a_namespace_that_nobody_uses_is_forgotten(self, driver, catalog, clock):
        driver.grow(A)
        clock.advance(SPACE_IDLE_S)
        catalog.sweep()
        assert catalog.snapshot().namespaces == {A.namespace}

    # Finding pages.

    def test_a_page_is_found_where_it_was_written(self, driver, catalog):
        driver.grow()
        slots = driver.store(chain("x", 3))
        missing = key("other")
        hits = catalog.lookup(A.namespace, [*chain("x", 3), missing])
        assert hits == [*(Hit(*slot) for slot in slots), None]
        packed = [PACKED_HIT.pack(*slot.address, slot.generation) for slot in slots]
        expected = b"".join([*packed, bytes(PACKED_HIT.size)])
        assert catalog.lookup_packed(A.namespace, [*chain("x", 3), missing]) == expected

    def test_namespaces_do_not_share_keys(self, driver):
        driver.grow(A)
        driver.store([key("x")], A)
        assert driver.present([key("x")], B) == [False]
        driver.grow(B)
        driver.store([key("x")], B)
        assert driver.present([key("x")], A) == [True]

    def test_whether_pages_are_there_is_no_lookup(self, driver, catalog):
        driver.grow()
        driver.store(chain("x", 2))
        asked = [key("other"), *chain("x", 2)]
        before = catalog.stats()
        assert catalog.present(A.namespace, asked) == [False, True, True]
        assert catalog.present(B.namespace, asked) == 3 * [False]
        assert catalog.present(A.namespace, []) == []
        catalog.sweep()
        assert catalog.stats() == before

    def test_lookups_and_hits_are_counted(self, driver, catalog):
        driver.grow()
        driver.store(chain("x", 3))
        catalog.lookup(A.namespace, [*chain("x", 3), key("other")])
        catalog.lookup(A.namespace, [key("other")])
        catalog.sweep()
        stats = catalog.stats()
        assert (stats.lookup_key_count, stats.hit_key_count) == (5, 3)

    def test_lookups_are_counted_for_each_namespace(self, driver, catalog):
        driver.grow(A)
        driver.grow(B)
        driver.store(chain("x", 3))
        for _ in range(2):
            catalog.lookup(A.namespace, [*chain("x", 3), key("other")])
            catalog.lookup(B.namespace, [key("other")])
            catalog.sweep()
        a, b = sorted(catalog.stats().spaces, key=lambda space: space.description)
        assert (a.lookup_key_count, a.hit_key_count) == (8, 6)
        assert (b.lookup_key_count, b.hit_key_count) == (2, 0)

    def test_the_hottest_pages_come_first_and_parents_before_children(self, driver, catalog, clock):
        driver.grow(count=2)
        driver.store(chain("x", 3))
        driver.store(chain("y", 2))
        clock.advance(2 * AGE_STEP_S)
        catalog.touch(A.namespace, chain("x", 2)[-1:])
        found = catalog.hottest(A.namespace, 4)
        (x0, x1, x2), (y0, _) = chain("x", 3), chain("y", 2)
        assert found[:2] == [HotPage(x0, ROOT, 0, 0), HotPage(x1, x0, 1, 0)]
        assert found[2:] == [HotPage(y0, ROOT, 0, 2), HotPage(chain("y", 2)[1], y0, 1, 2)]
        assert HotPage(x2, x1, 2, 2) in catalog.hottest(A.namespace, 9)
        assert catalog.hottest(B.namespace, 4) == catalog.hottest(b"?" * 32, 4) == []

    # Reserving and committing.

    def test_no_slot_has_two_owners(self, driver, catalog):
        driver.grow(count=2)
        first = driver.reserve(5)
        second = catalog.reserve(A.namespace, 100, LEASE_S)
        assert len(second) == 3, "fewer where fewer are free"
        addresses = [slot.address for slot in (*first, *second)]
        assert len(set(addresses)) == 8
        assert len({slot.generation for slot in (*first, *second)}) == 8
        assert catalog.reserve(A.namespace, 1, LEASE_S) == []

    def test_a_reserved_page_is_not_found(self, driver):
        driver.grow(B, 1)
        (slot,) = driver.reserve(1, B)
        assert driver.commit(key("x"), slot, B, range(0, 2)) is Verdict.PARTIAL
        assert driver.present([key("x")], B) == [False]

    def test_a_page_is_published_by_its_last_slice_in_any_order(self, driver):
        driver.grow(B)
        (slot,) = driver.reserve(1, B)
        assert driver.commit(key("x"), slot, B, range(2, 3)) is Verdict.PARTIAL
        assert driver.commit(key("x"), slot, B, range(2, 3)) is Verdict.PARTIAL
        assert driver.commit(key("x"), slot, B, range(0, 1)) is Verdict.PARTIAL
        assert driver.commit(key("x"), slot, B, range(1, 2)) is Verdict.PUBLISHED
        assert driver.commit(key("x"), slot, B, range(1, 2)) is Verdict.PUBLISHED
        assert driver.present([key("x")], B) == [True]

    def test_slices_of_two_generations_make_no_page(self, driver):
        driver.grow(B)
        first, second = driver.reserve(2, B)
        assert driver.commit(key("x"), first, B, range(0, 2)) is Verdict.PARTIAL
        assert driver.commit(key("x"), second, B, range(2, 3)) is Verdict.PARTIAL
        assert driver.present([key("x")], B) == [False]

    def test_of_two_writers_one_wins_and_the_other_slot_is_free_at_once(self, driver, catalog):
        driver.grow()
        first, second = driver.reserve(2)
        assert driver.commit(key("x"), first) is Verdict.PUBLISHED
        assert driver.free_count() == 2
        assert driver.commit(key("x"), second) is Verdict.DUPLICATE
        assert driver.free_count() == 3
        assert driver.commit(key("x"), second) is Verdict.DUPLICATE
        assert catalog.lookup(A.namespace, [key("x")]) == [Hit(*first)]
        assert catalog.stats().duplicate_count == 1

    def test_the_loser_of_a_race_keeps_its_slot_while_ranks_may_write_to_it(self, driver, catalog):
        driver.grow(B)
        first, second = driver.reserve(2, B)
        assert driver.commit(key("x"), first, B) is Verdict.PUBLISHED
        assert driver.commit(key("x"), second, B, range(0, 1)) is Verdict.DUPLICATE
        assert second.address in catalog.snapshot().reserved
        assert driver.commit(key("x"), second, B, range(1, 3)) is Verdict.DUPLICATE
        assert second.address in catalog.snapshot().free

    def test_a_commit_after_the_lease_is_refused(self, driver, clock):
        driver.grow()
        (slot,) = driver.reserve(1)
        clock.advance(LEASE_S)
        assert driver.commit(key("x"), slot) is Verdict.EXPIRED
        assert driver.present([key("x")]) == [False]

    def test_a_commit_in_the_last_moment_of_the_lease_counts(self, driver, clock):
        driver.grow()
        (slot,) = driver.reserve(1)
        clock.advance(LEASE_S - 0.001)
        assert driver.commit(key("x"), slot) is Verdict.PUBLISHED

    def test_a_commit_of_a_stranger_is_refused(self, driver):
        driver.grow(A)
        driver.grow(B)
        (slot,) = driver.reserve(1)
        assert driver.commit(key("x"), Slot(slot.address, bytes(16))) is Verdict.EXPIRED
        assert driver.commit(key("x"), slot, B) is Verdict.EXPIRED
        assert driver.commit(key("x"), Slot(Address(99, 0), slot.generation)) is Verdict.EXPIRED

    def test_a_slot_takes_the_slices_of_one_key(self, driver):
        driver.grow(B)
        (slot,) = driver.reserve(1, B)
        assert driver.commit(key("x"), slot, B, range(0, 1)) is Verdict.PARTIAL
        assert driver.commit(key("y"), slot, B, range(1, 3)) is Verdict.EXPIRED
        assert driver.commit(key("x"), slot, B, range(1, 3)) is Verdict.PUBLISHED

    @pytest.mark.parametrize("slices", [range(0, 4), range(3, 4), range(-1, 1)])
    def test_slices_outside_the_page_are_our_own_bug(self, driver, slices):
        driver.grow(B)
        (slot,) = driver.reserve(1, B)
        with pytest.raises(InternalError, match="slices"):
            driver.commit(key("x"), slot, B, slices)

    # Slots come back.

    def test_an_abandoned_slot_is_free_after_lease_and_grace(self, driver, catalog, clock):
        driver.grow()
        driver.reserve(4)
        clock.advance(LEASE_S)
        assert catalog.sweep().expired_count == 4
        assert driver.free_count() == 0, "a slow writer may still write"
        clock.advance(GRACE_S - 0.001)
        catalog.sweep()
        assert driver.free_count() == 0
        clock.advance(0.001)
        catalog.sweep()
        assert driver.free_count() == 4

    def test_lease_and_grace_pass_whether_or_not_anybody_sweeps(self, driver, catalog, clock):
        driver.grow()
        driver.reserve(4)
        clock.advance(LEASE_S + GRACE_S)
        assert catalog.sweep().expired_count == 4
        assert driver.free_count() == 4

    def test_an_aborted_slot_is_free_after_the_grace(self, driver, catalog, clock):
        driver.grow()
        slots = driver.reserve(4)
        catalog.abort(A.namespace, slots[:2])
        catalog.abort(A.namespace, slots[:2])
        assert driver.commit(key("x"), slots[0]) is Verdict.EXPIRED
        clock.advance(GRACE_S)
        catalog.sweep()
        assert driver.free_count() == 2

    def test_an_abort_that_comes_late_hurts_no_other_owner(self, driver, catalog, clock):
        driver.grow()
        slots = driver.reserve(4)
        driver.commit(key("x"), slots[0])
        catalog.abort(A.namespace, slots)
        assert driver.present([key("x")]) == [True], "published: not the writer's any more"
        clock.advance(GRACE_S)
        catalog.sweep()
        others = driver.reserve(3)
        catalog.abort(A.namespace, slots)
        assert driver.commit(key("y"), others[0]) is Verdict.PUBLISHED

    def test_an_evicted_page_is_gone_at_once_and_its_slot_later(self, driver, catalog, clock):
        driver.grow()
        keys = chain("x", 4)
        slots = driver.store(keys)
        assert catalog.evict(A.namespace, [(keys[3], slots[3].generation)]) == 1
        assert catalog.evict(A.namespace, [(keys[3], slots[3].generation)]) == 0
        assert driver.present(keys) == [True, True, True, False]
        clock.advance(GRACE_S - 0.001)
        catalog.sweep()
        assert catalog.reserve(A.namespace, 1, LEASE_S) == []
        clock.advance(0.001)
        catalog.sweep()
        assert driver.reserve(1)[0].address == slots[3].address

    def test_evicting_another_generation_leaves_the_page(self, driver, catalog):
        driver.grow()
        driver.store([key("x")])
        assert catalog.evict(A.namespace, [(key("x"), bytes(16))]) == 0
        assert driver.present([key("x")]) == [True]
