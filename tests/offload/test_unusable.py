"""A root that is out, or a segment that lost its file, must not take all new stores with it."""

import pytest

from kvferry.catalog.base import Commit
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.snapshot import SegmentState
from kvferry.metrics import Metrics
from kvferry.offload.space.growth import Growth
from kvferry.offload.space.room import Room, unpack
from kvferry.pages.base import Outcome
from kvferry.testing.runner import PromptRunner
from kvferry.testing.staging import Driver, page_id
from tests.offload.parts import make_part
from tests.pages.test_spread import SpreadPlace

PART, OTHER_PART = make_part(), make_part(group_index=1)
GRACE_S, LEASE_S = 10.0, 60.0
WANTED = 8


class Store:
    """Two roots in memory; an engine that stores `WANTED` pages a second."""

    def __init__(self):
        self.place = SpreadPlace((None, None))
        self.clock = self.place.clock
        self.pages = self.place.store()
        facts = self.pages.open()
        for root, place in zip(self.place.roots, self.place.places, strict=True):
            root.available_bytes = lambda medium=place.medium: 1000 - len(medium.segments)
        self.catalog = MemoryCatalog(self.clock, grace_s=GRACE_S)
        self.catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
        files, metrics = PromptRunner(self.clock), Metrics()
        growth = Growth(self.catalog, self.pages, files, self.clock, metrics, 0.0)
        self.room = Room(self.catalog, self.pages, facts, growth, self.clock, metrics)
        self._driver = Driver(self.pages, PART.geometry)
        self._page_count = 0

    def second(self, part=PART) -> int:
        """How many pages were stored."""
        stored_count = 0
        for slot in unpack(self.room.reserve(part, WANTED, LEASE_S).packed):
            self._page_count += 1
            generation = int.from_bytes(slot.generation, "big")
            page = page_id(f"page {self._page_count}", generation, part.namespace)
            if self._driver.write(page, slot.address).outcome is Outcome.OK:
                commit = Commit(page.key, page.parent, 0, slot, 0, part.slice_count)
                self.catalog.commit(part.namespace, [commit])
                stored_count += 1
        self.clock.advance(1.0)
        self.room.collect([(part.namespace, WANTED)])
        return stored_count

    def seconds(self, count: int, part=PART) -> int:
        return sum(self.second(part) for _ in range(count))


@pytest.fixture
def store():
    store = Store()
    store.seconds(200)  # until it is full, and evicts as much as it stores
    return store


def test_with_a_root_out_as_much_is_stored_as_with_all(store):
    whole_count = store.seconds(300)
    store.place.roots[1].is_broken = True
    store.seconds(600)  # its pages grow cold and go first
    assert store.seconds(300) > 0.8 * whole_count
    store.place.roots[1].is_broken = False
    store.seconds(800)
    used = {address for address, _ in pages_of(store)}
    assert len(used) > 0.8 * sum(s.slot_count for s in store.catalog.segments().values())


def pages_of(store):
    return [(page.address, page) for page in store.catalog.snapshot().pages.values()]


def test_a_segment_without_a_file_is_forgotten_when_its_slots_are_given_out(store):
    """`kvferry clear` was killed after it had deleted the file, or deleted it while a rebuild took
    it over."""
    whole_count = store.seconds(300)
    for medium in (place.medium for place in store.place.places):
        medium.segments.pop(min(medium.segments))
    gone = set(store.catalog.segments()) - {f.segment for f in store.pages.segments()}
    assert len(gone) == 2
    store.catalog.evict(PART.namespace, [name for a, name in named(store) if a.segment in gone])
    store.seconds(int(GRACE_S) + 2)
    assert not gone & set(store.catalog.segments())
    assert store.seconds(300) > 0.9 * whole_count


def named(store):
    """Addresses and names of all pages."""
    pages = store.catalog.snapshot().pages.items()
    return [(page.address, (key, page.generation)) for (_, key), page in pages]


def test_segments_that_cannot_be_deleted_are_no_room(store):
    """Those of an older model, on a root that is out: the new model waited for their room."""
    store.place.roots[1].is_broken = True
    store.seconds(3 * WANTED)
    for root in store.place.roots[1:]:
        root.is_gone = True
    counts = [store.seconds(60, OTHER_PART) for _ in range(20)]
    states = {entry.state for entry in store.catalog.segments().values()}
    assert SegmentState.EMPTIED in states
    assert min(counts[-10:]) > 0
