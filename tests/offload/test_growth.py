"""The store grows beside whatever else asks the catalog; what cannot be made is not counted."""

import pytest

from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.runner import Runner
from kvferry.metrics import Metrics
from kvferry.offload.growth import MAKE_S, Growth
from kvferry.offload.room import Room, unpack
from kvferry.pages.facts import Asked
from kvferry.pages.memory import Medium, MemoryPages
from kvferry.testing.clock import ManualClock
from tests.offload.parts import make_part

PART = make_part()
CAPACITY_BYTES, SEGMENT_BYTES = 4 << 16, 1 << 16
LEASE_S = 60.0


class Store:
    """An empty store with room for four segments; `files` is stepped by hand."""

    def __init__(self):
        self.clock, self.metrics, self.medium = ManualClock(), Metrics(), Medium()
        self.pages = MemoryPages(
            self.medium, self.clock, Asked(CAPACITY_BYTES, 4096, SEGMENT_BYTES)
        )
        facts = self.pages.open()
        self.catalog = MemoryCatalog(self.clock)
        self.catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
        self.files = Runner(self.clock)
        growth = Growth(self.catalog, self.pages, self.files, self.clock, self.metrics, 0.0)
        self.room = Room(self.catalog, self.pages, facts, growth, self.metrics)

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
    while store.files.step():
        pass
    store.reserve(1000)
    while store.files.step():
        pass
    assert len(store.medium.segments) > 1


def test_a_file_that_comes_too_late_is_deleted(store):
    store.reserve()
    store.clock.advance(MAKE_S + 1)
    assert store.files.step() is not None
    assert not store.medium.segments
    store.clock.advance(MAKE_S)
    store.reserve()
    store.files.step()
    assert store.reserve().packed


def test_what_breaks_a_file_is_told_to_whoever_reserves_next(store, monkeypatch):
    def broken(*arguments):
        raise OSError(5, "broken")

    monkeypatch.setattr(store.pages, "create_segment", broken)
    store.reserve()
    store.files.step()
    with pytest.raises(OSError, match="broken"):
        store.reserve()
