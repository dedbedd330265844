"""What every catalog must do with room: segments, eviction, adoption. See `testing.catalog`."""

import pytest

from kvferry.catalog.base import (
    AGE_STEP_S,
    CREATION_S,
    GRACE_S,
    Commit,
    Page,
    Refused,
    Slot,
    Verdict,
    Want,
)
from kvferry.catalog.snapshot import SegmentState
from kvferry.catalog.sweeping import HIGH_MARK_PART
from kvferry.errors import ExhaustedError
from kvferry.layout import Address
from kvferry.testing.catalog import (
    CAPACITY_BYTES,
    LEASE_S,
    ROOT,
    SEGMENT_BYTES,
    SEGMENTS_MAX,
    STORE,
    A,
    B,
    CatalogFixtures,
    chain,
    key,
)


class CatalogSpaceSuite(CatalogFixtures):
    """Conformance of a `Catalog`, second part."""

    # The budget.

    def test_the_budget_is_never_exceeded(self, driver, catalog):
        driver.grow(A, 2)
        driver.grow(B, SEGMENTS_MAX - 2)
        assert catalog.grow(A.namespace) is Refused.BUDGET
        assert catalog.grow(B.namespace) is Refused.BUDGET
        assert catalog.stats().segment_count == SEGMENTS_MAX

    def test_a_segment_gives_slots_when_its_file_is_there(self, driver, catalog):
        number = catalog.grow(A.namespace)
        assert catalog.reserve(A.namespace, 1, LEASE_S) == []
        assert catalog.grown(number)
        assert driver.free_count() == A.slot_count
        driver.store(chain("x", 2))
        assert catalog.grown(number), "again: nothing changes"
        assert driver.free_count() == A.slot_count - 2

    def test_a_segment_counts_until_its_file_is_gone(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        clock.advance(CREATION_S)
        assert catalog.sweep([Want(B.namespace, 1)]).deletable_segments == (), "may be read yet"
        assert catalog.grow(B.namespace) is Refused.BUDGET
        clock.advance(GRACE_S)
        (number,) = catalog.sweep().deletable_segments
        assert catalog.grow(B.namespace) is Refused.BUDGET
        catalog.shrunk(number)
        catalog.shrunk(number)
        assert isinstance(catalog.grow(B.namespace), int)

    def test_a_segment_whose_maker_died_is_handed_out_for_deletion(self, driver, catalog, clock):
        number = catalog.grow(A.namespace)
        clock.advance(CREATION_S - 0.001)
        assert catalog.sweep().deletable_segments == ()
        clock.advance(0.001)
        assert catalog.sweep().deletable_segments == (number,)
        assert catalog.sweep().deletable_segments == (number,), "again, until somebody did it"
        assert not catalog.grown(number), "its maker must delete what it made too late"
        catalog.shrunk(number)
        assert not catalog.grown(number)

    def test_numbers_of_segments_are_never_used_again(self, driver, catalog):
        number = catalog.grow(A.namespace)
        catalog.shrunk(number)
        assert catalog.grow(A.namespace) > number

    def test_a_file_that_vanished_takes_its_pages_with_it(self, driver, catalog, clock):
        (number,) = driver.grow()
        slots = driver.store(chain("x", 2))
        (reserved,) = driver.reserve(1)
        catalog.evict(A.namespace, [(chain("x", 2)[1], slots[1].generation)])
        catalog.shrunk(number)
        assert driver.present(chain("x", 2)) == [False, False]
        assert driver.commit(key("y"), reserved) is Verdict.EXPIRED
        clock.advance(LEASE_S + GRACE_S)
        assert catalog.sweep().expired_count == 0
        assert driver.free_count() == 0

    def test_a_smaller_store_is_emptied_to_its_size(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        for index in range(SEGMENTS_MAX):
            driver.store(chain(f"x{index}", A.slot_count))
            clock.advance(AGE_STEP_S)
        catalog.close()
        catalog.open(STORE, 2 * SEGMENT_BYTES, SEGMENT_BYTES)
        catalog.sweep()
        clock.advance(GRACE_S)
        deletable = catalog.sweep().deletable_segments
        assert deletable == (0, 1), "the coldest go"
        for number in deletable:
            catalog.shrunk(number)
        assert driver.present(chain("x3", 4)) == [True] * 4
        assert catalog.grow(A.namespace) is Refused.BUDGET

    # Eviction inside a namespace.

    @pytest.fixture
    def full(self, driver):
        """All segments are A's and full: four chains of four pages."""
        driver.grow(A, SEGMENTS_MAX)
        for index in range(SEGMENTS_MAX):
            driver.store(chain(f"x{index}", A.slot_count))
        return driver

    def left(self, driver):
        return [sum(driver.present(chain(f"x{i}", A.slot_count))) for i in range(SEGMENTS_MAX)]

    def test_what_was_not_used_goes_first(self, full, catalog, clock):
        clock.advance(AGE_STEP_S)
        for index in (0, 2, 3):
            catalog.touch(A.namespace, chain(f"x{index}", 4))
        assert catalog.sweep([Want(A.namespace, 4)]).evicted_count == 4
        assert self.left(full) == [4, 0, 4, 4]

    def test_leaves_go_before_what_they_hang_on(self, full, catalog):
        catalog.sweep([Want(A.namespace, 6)])
        for index in range(SEGMENTS_MAX):
            present = full.present(chain(f"x{index}", A.slot_count))
            assert present == sorted(present, reverse=True)
        assert sorted(self.left(full)) == [2, 2, 3, 3]

    def test_using_a_leaf_keeps_all_that_it_hangs_on(self, full, catalog, clock):
        clock.advance(AGE_STEP_S)
        catalog.touch(A.namespace, [chain("x1", 4)[3]])
        assert catalog.sweep([Want(A.namespace, 11)]).evicted_count == 11 + 11 // HIGH_MARK_PART
        assert self.left(full) == [0, 4, 0, 0]

    def test_a_new_page_keeps_what_it_hangs_on(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        keys = chain("old", 4)
        driver.store(keys)
        driver.store(chain("other", 4))
        clock.advance(AGE_STEP_S)
        (slot,) = driver.reserve(1)
        catalog.commit(A.namespace, [Commit(key("new"), keys[3], 4, slot, 0, 1)])
        driver.reserve(7)
        catalog.sweep([Want(A.namespace, 4)])
        assert driver.present([*keys, key("new")]) == [True] * 5
        assert driver.present(chain("other", 4)) == [False] * 4

    def test_a_parent_that_comes_after_its_child_is_not_older(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        first, second, third = driver.reserve(3, lease_s=1000.0)
        catalog.commit(A.namespace, [Commit(key("child"), key("parent"), 1, second, 0, 1)])
        clock.advance(AGE_STEP_S)
        catalog.touch(A.namespace, [key("child")])
        catalog.commit(A.namespace, [Commit(key("parent"), ROOT, 0, first, 0, 1)])
        again = Commit(key("child"), key("parent"), 1, third, 0, 1)
        assert catalog.commit(A.namespace, [again]) == [Verdict.DUPLICATE]
        driver.reserve(4 * A.slot_count - 8, lease_s=1000.0)
        assert catalog.sweep([Want(A.namespace, 7)]).evicted_count == 1
        assert driver.present([key("parent"), key("child")]) == [True, False]

    def test_nothing_is_evicted_while_room_is_left(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX - 1)
        keys = [*chain("x", 4), *chain("y", 4), *chain("z", 2)]
        slots = driver.store(keys)
        catalog.evict(A.namespace, [(keys[9], slots[9].generation)])
        wanted = 2 + 1 + A.slot_count  # free, graced, growable
        assert catalog.sweep([Want(A.namespace, wanted)]).evicted_count == 0
        assert catalog.sweep([Want(A.namespace, wanted + 1)]).evicted_count == 2, "to the high mark"

    def test_what_a_full_disk_has_no_room_for_is_not_room(self, driver, catalog, clock):
        driver.grow(A, 1)
        driver.store(chain("x", A.slot_count))
        assert catalog.sweep([Want(A.namespace, 2)]).evicted_count == 0
        assert catalog.sweep([Want(A.namespace, 2)], False).evicted_count == 2
        assert catalog.sweep([Want(A.namespace, 2)], False).evicted_count == 0

    def test_a_sweep_makes_the_room_that_is_wanted(self, full, catalog, clock):
        catalog.sweep([Want(A.namespace, 5)])
        clock.advance(GRACE_S)
        catalog.sweep()
        assert full.free_count() == 5
        assert catalog.sweep([Want(A.namespace, 5)]).evicted_count == 0

    def test_more_than_there_is_evicts_all_and_ends(self, full, catalog):
        assert catalog.sweep([Want(A.namespace, 10_000)]).evicted_count == 16

    # Space between namespaces.

    def take_over(self, catalog, clock, space, count):
        """What a runner does until `count` slots of a namespace are there, or gives up."""
        slots = []
        for _ in range(40):
            slots += catalog.reserve(space.namespace, count - len(slots), 1000.0)
            if len(slots) == count:
                break
            number = catalog.grow(space.namespace)
            if isinstance(number, int):
                catalog.grown(number)
                continue
            swept = catalog.sweep([Want(space.namespace, count - len(slots))])
            for number in swept.deletable_segments:
                catalog.shrunk(number)
            clock.advance(GRACE_S)
        return slots

    def test_a_new_model_gets_the_room_of_one_that_nobody_uses(self, full, catalog, clock):
        clock.advance(AGE_STEP_S)
        total = SEGMENTS_MAX * B.slot_count
        slots = self.take_over(catalog, clock, B, total)
        assert len(slots) == total
        assert self.left(full) == [0, 0, 0, 0]

    def test_the_segment_that_is_coldest_on_average_goes(self, full, catalog, clock):
        clock.advance(AGE_STEP_S)
        for index in (0, 1, 3):
            catalog.touch(A.namespace, chain(f"x{index}", 4)[:3])
        catalog.touch(A.namespace, chain("x2", 4)[:1])
        assert catalog.sweep([Want(B.namespace, 1)]).evicted_count == 4
        assert self.left(full) == [4, 4, 0, 4]

    def test_a_model_in_use_keeps_its_room_from_one_that_is_colder(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX - 1)
        driver.store(chain("x", 12))
        driver.grow(B)
        driver.store(chain("y", 3), B)
        clock.advance(AGE_STEP_S)
        catalog.touch(A.namespace, chain("x", 12))
        assert catalog.sweep([Want(B.namespace, 2)]).evicted_count == 2
        assert driver.present(chain("x", 12)) == [True] * 12
        assert driver.present(chain("y", 3), B) == [True, False, False]

    def test_at_equal_age_who_has_most_gives(self, driver, catalog):
        driver.grow(A, SEGMENTS_MAX - 1)
        driver.store(chain("x", 12))
        driver.grow(B)
        driver.store(chain("y", 3), B)
        assert catalog.sweep([Want(B.namespace, 1)]).evicted_count == 4
        assert driver.present(chain("y", 3), B) == [True] * 3

    def test_at_equal_age_and_size_who_wants_gives(self, driver, catalog):
        driver.grow(A, SEGMENTS_MAX // 2)
        driver.store(chain("x", 8))
        driver.grow(B, SEGMENTS_MAX // 2)
        driver.store(chain("y", 6), B)
        for space in (A, B):
            assert catalog.sweep([Want(space.namespace, 1)]).evicted_count == 1
        assert driver.present(chain("x", 8)) == [True] * 7 + [False]
        assert driver.present(chain("y", 6), B) == [True] * 5 + [False]

    def test_an_idle_segment_goes_before_any_page(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX - 1)
        driver.store(chain("x", 8))
        driver.grow(B)
        driver.store(chain("y", 3), B)
        clock.advance(CREATION_S)
        assert catalog.sweep([Want(B.namespace, 1)]).evicted_count == 0
        assert driver.present(chain("x", 8)) == [True] * 8
        states = [entry.state for entry in catalog.snapshot().segments.values()]
        assert states.count(SegmentState.EMPTIED) == 1

    def test_a_segment_just_made_is_not_idle(self, driver, catalog):
        (first,) = driver.grow(A, 1)
        driver.store(chain("x", 4))
        driver.grow(A, SEGMENTS_MAX - 1)
        catalog.sweep([Want(B.namespace, 1)])
        states = {number: entry.state for number, entry in catalog.snapshot().segments.items()}
        assert [n for n in states if states[n] is SegmentState.EMPTIED] == [first]

    def test_a_segment_that_a_writer_holds_is_not_idle(self, driver, catalog, clock):
        held, spare = driver.grow(A, 2)
        (slot,) = driver.reserve(1, lease_s=1000.0)
        assert slot.address.segment == held
        driver.grow(B, SEGMENTS_MAX - 2)
        driver.store(chain("x", 6), B)
        clock.advance(CREATION_S)
        catalog.sweep([Want(B.namespace, 1)])
        assert catalog.segments()[held].state is SegmentState.READY
        assert catalog.segments()[spare].state is SegmentState.EMPTIED

    def test_a_lease_in_an_emptied_segment_is_not_cut_short(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        driver.store(chain("x", 15))
        (slot,) = driver.reserve(1, lease_s=1000.0)
        clock.advance(AGE_STEP_S)
        while not any(
            entry.state is SegmentState.EMPTIED and number == slot.address.segment
            for number, entry in catalog.snapshot().segments.items()
        ):
            assert catalog.sweep([Want(B.namespace, SEGMENTS_MAX * B.slot_count)]).evicted_count
        assert driver.commit(key("y"), slot) is Verdict.EXPIRED
        clock.advance(GRACE_S)
        assert slot.address.segment not in catalog.sweep().deletable_segments
        clock.advance(1000.0 - AGE_STEP_S)
        assert slot.address.segment in catalog.sweep().deletable_segments

    def test_an_emptied_segment_gives_no_slots(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        slots = driver.reserve(2)
        catalog.abort(A.namespace, slots)
        clock.advance(CREATION_S)
        catalog.sweep([Want(B.namespace, SEGMENTS_MAX * B.slot_count)])
        clock.advance(GRACE_S)
        catalog.sweep()
        assert catalog.reserve(A.namespace, 1, LEASE_S) == []

    # Adoption.

    def found(self, space, segment, keys, first_slot=0):
        parents = [ROOT, *keys]
        return [
            Page(name, parents[i], i, Address(segment, first_slot + i), bytes([i + 1]) * 16)
            for i, name in enumerate(keys)
        ]

    def test_pages_found_on_the_store_are_found_by_lookups(self, driver, catalog):
        pages = self.found(A, 7, chain("x", 3))
        assert catalog.adopt(7, A.namespace, pages) == 3
        hits = catalog.lookup(A.namespace, chain("x", 3))
        assert [(hit.address, hit.generation) for hit in hits] == [
            (page.address, page.generation) for page in pages
        ]
        assert driver.free_count() == 1
        assert catalog.grow(A.namespace) > 7

    def test_adopting_again_changes_nothing(self, driver, catalog):
        pages = self.found(A, 7, chain("x", 3))
        catalog.adopt(7, A.namespace, pages)
        before = catalog.snapshot()
        assert catalog.adopt(7, A.namespace, pages) == 0
        assert catalog.snapshot() == before

    def test_of_two_pages_of_a_key_or_a_slot_one_is_adopted(self, driver, catalog):
        twice = self.found(A, 7, [key("x"), key("x")])
        assert catalog.adopt(7, A.namespace, twice) == 1
        same_slot = [*self.found(A, 8, [key("y")]), *self.found(A, 8, [key("z")])]
        assert catalog.adopt(8, A.namespace, same_slot) == 1
        outside = [*self.found(A, 9, [key("w")], A.slot_count), *self.found(A, 7, [key("v")])]
        assert catalog.adopt(9, A.namespace, outside) == 0

    def test_the_budget_holds_for_adopted_segments(self, driver, catalog):
        for number in range(SEGMENTS_MAX):
            catalog.adopt(number, A.namespace, self.found(A, number, chain(f"x{number}", 4)))
        with pytest.raises(ExhaustedError):
            catalog.adopt(99, A.namespace, self.found(A, 99, chain("y", 4)))
        assert driver.present(chain("y", 4)) == [False] * 4

    # Figures.

    def test_figures_say_what_is_there(self, driver, catalog, clock):
        driver.grow(A, 2)
        slots = driver.store(chain("x", 3))
        driver.reserve(2)
        catalog.abort(A.namespace, driver.reserve(1))
        catalog.evict(A.namespace, [(chain("x", 3)[2], slots[2].generation)])
        clock.advance(LEASE_S)
        catalog.sweep()
        driver.reserve(1)
        stats = catalog.stats()
        assert (stats.capacity_bytes, stats.segment_bytes) == (CAPACITY_BYTES, SEGMENT_BYTES)
        assert (stats.published_count, stats.expired_count, stats.evicted_count) == (3, 2, 1)
        a, b = sorted(stats.spaces, key=lambda space: space.namespace)
        assert (a.page_count, a.reserved_count, a.graced_count, a.segment_count) == (2, 1, 2, 2)
        assert (b.page_count, b.segment_count, b.slot_bytes) == (0, 0, B.slot_bytes)
        assert stats.segment_count == 2

    def test_a_stale_generation_is_never_published(self, driver, catalog, clock):
        driver.grow()
        (old,) = driver.reserve(1)
        clock.advance(LEASE_S + GRACE_S)
        catalog.sweep()
        (new,) = driver.reserve(1)
        assert new.address == old.address
        assert driver.commit(key("x"), old) is Verdict.EXPIRED
        assert driver.commit(key("x"), Slot(old.address, new.generation)) is Verdict.PUBLISHED
