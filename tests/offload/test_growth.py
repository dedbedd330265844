"""The store grows beside whatever else asks the catalog; what cannot be made is not counted."""

import pytest

from kvferry.catalog.base import GRACE_S, Commit, Verdict
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.runner import Runner
from kvferry.errors import InternalError
from kvferry.metrics import Metrics
from kvferry.offload.space.growth import FULL_S, MAKE_S, Growth
from kvferry.offload.space.room import Room, unpack
from kvferry.pages.facts import Asked
from kvferry.pages.memory import Medium, MemoryPages
from kvferry.testing.clock import ManualClock
from kvferry.testing.runner import PromptRunner
from tests.offload.parts import make_part

PART = make_part()
CAPACITY_BYTES, SEGMENT_BYTES = 4 << 16, 1 << 16
LEASE_S = 60.0


class Store:
    """An empty store with room for four segments. `files`: of this kind, stepped by hand."""

    def __init__(self, make_files=Runner):
        self.clock, self.metrics, self.medium = ManualClock(), Metrics(), Medium()
        self.pages = MemoryPages(
            self.medium, self.clock, Asked(CAPACITY_BYTES, 4096, SEGMENT_BYTES)
        )
        facts = self.pages.open()
        self.catalog = MemoryCatalog(self.clock)
        self.catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
        self.files = make_files(self.clock)
        growth = Growth(self.catalog, self.pages, self.files, self.clock, self.metrics, 0.0)
        self.room = Room(self.catalog, self.pages, facts, growth, self.clock, self.metrics)

    def reserve(self, count: int = 3):
        return self.room.reserve(PART, count, LEASE_S)


@pytest.fixture
def store():
    return Store()


def test_whoever_reserves_does_not_wait_for_a_file(store):
    assert store.reserve() == (b"", True)
    assert not store.medium.segments
    assert store.files.step()
    packed, is_growing = store.reserve()
    assert len(unpack(packed)) == 3
    assert not is_growing
    assert store.metrics.value("kvferry_segments_created_total") == 1


def test_no_more_is_made_than_there_is_room_for(store):
    for _ in range(10):
        store.reserve(1000)
    while store.files.step():
        pass
    assert store.reserve(1000).packed
    assert len(store.medium.segments) == CAPACITY_BYTES // SEGMENT_BYTES


def test_a_disk_that_is_full_gives_its_budget_back(store):
    store.medium.room_bytes = SEGMENT_BYTES
    store.reserve()
    store.files.step()
    assert store.reserve(1000).packed
    while store.files.step():
        pass
    store.reserve()
    assert len(store.medium.segments) == 1
    assert store.metrics.value("kvferry_store_drops_total", reason="no_space") > 0
    store.medium.room_bytes = None
    store.clock.advance(FULL_S)
    store.reserve(1000)
    while store.files.step():
        pass
    assert len(store.medium.segments) > 1


def fill(store):
    """All slots that there can be hold pages; returns how many."""
    slots = unpack(store.reserve(1000).packed)
    while store.files.step():
        pass
    slots += unpack(store.reserve(1000).packed)
    commits = [
        Commit(bytes([index]) * 32, bytes(32), index, slot, 0, PART.slice_count)
        for index, slot in enumerate(slots)
    ]
    assert set(store.catalog.commit(PART.namespace, commits)) == {Verdict.PUBLISHED}
    return len(slots)


@pytest.mark.parametrize("make_files", [Runner, PromptRunner])
def test_where_the_disk_has_less_than_the_budget_old_pages_make_room(make_files):
    """They did not: what the budget still had was counted as room, for ever."""
    store = Store(make_files)
    store.medium.room_bytes = SEGMENT_BYTES
    page_count = fill(store)
    for _ in range(3):
        store.reserve(2)
        while store.files.step():
            pass
    store.room.collect([(PART.namespace, 2)])
    store.clock.advance(GRACE_S + 1)
    store.room.collect()
    assert len(unpack(store.reserve(2).packed)) == 2
    assert len(store.catalog.snapshot().pages) == page_count - 2
    assert len(store.medium.segments) == 1


def test_who_reserves_from_a_full_store_evicts_nothing():
    """Room is made ahead of need, by the sweep of every second."""
    store = Store(PromptRunner)
    page_count = fill(store)
    assert store.reserve(2) == (b"", False)
    assert len(store.catalog.snapshot().pages) == page_count
    store.room.collect([(PART.namespace, 4)])
    assert len(store.catalog.snapshot().pages) == page_count - 4
    store.clock.advance(GRACE_S)
    store.room.collect([(PART.namespace, 4)])
    assert len(unpack(store.reserve(4).packed)) == 4
    assert len(store.catalog.snapshot().pages) == page_count - 4


def test_a_full_disk_is_not_asked_all_the_time(store, monkeypatch):
    asked = []
    store.medium.room_bytes = 0
    create = store.pages.create_segment
    monkeypatch.setattr(store.pages, "create_segment", lambda *a: asked.append(a) or create(*a))
    for _ in range(100):
        store.reserve()
        while store.files.step():
            pass
        store.clock.advance(0.01)
    assert 1 <= len(asked) <= 8
    store.medium.room_bytes = None
    store.clock.advance(FULL_S)
    store.reserve()
    while store.files.step():
        pass
    assert len(unpack(store.reserve().packed)) == 3


def test_a_file_that_comes_too_late_is_deleted(store):
    store.reserve()
    store.clock.advance(MAKE_S + 1)
    assert store.files.step() is not None
    assert not store.medium.segments
    store.clock.advance(MAKE_S)
    store.reserve()
    store.files.step()
    assert store.reserve().packed


def test_what_breaks_a_file_does_not_count_against_the_catalog(store, monkeypatch):
    """A few such errors opened the breaker: pages that can be read were not looked up."""

    def broken(*arguments):
        raise OSError(5, "broken")

    monkeypatch.setattr(store.pages, "create_segment", broken)
    store.reserve()
    store.files.step()
    assert store.reserve() == (b"", False)
    assert store.metrics.value("kvferry_store_drops_total", reason="io_error") == 1


def test_a_bug_in_making_a_file_is_told(store, monkeypatch):
    monkeypatch.setattr(store.pages, "create_segment", lambda *arguments: 1 / 0)
    store.reserve()
    store.files.step()
    with pytest.raises(InternalError):
        store.reserve()
