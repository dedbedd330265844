"""The reference page store conforms."""

import pytest

from kvferry.errors import ExhaustedError
from kvferry.pages.memory import Medium
from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import GEOMETRY, HOME, NAMESPACE, PageStoreSuite
from kvferry.testing.places import MemoryPlace
from kvferry.testing.staging import Driver, page_id


class TestMemoryPages(PageStoreSuite):
    @pytest.fixture
    def place(self):
        return MemoryPlace(ManualClock())


def test_a_full_medium_takes_no_segment_and_keeps_what_it_has():
    place = MemoryPlace(ManualClock(), Medium(room_bytes=2 << 20))
    store = place.store()
    store.open()
    store.create_segment(1, NAMESPACE, GEOMETRY)
    store.create_segment(2, NAMESPACE, GEOMETRY)
    with pytest.raises(ExhaustedError):
        store.create_segment(3, NAMESPACE, GEOMETRY)
    assert [found.segment for found in store.segments()] == [1, 2]
    assert store.used_bytes() == 2 << 20


def test_bytes_move_only_in_poll():
    """A caller that reuses a buffer before it has the result is found out by this store."""
    store = MemoryPlace(ManualClock()).store()
    store.open()
    store.create_segment(1, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    extent = driver.extent(page_id("a"), HOME)
    driver.fill(extent)
    store.submit_writes([extent])
    driver.spoil(extent)
    driver.results(1)
    assert driver.read(page_id("a"), HOME).payloads != driver.expected(extent)
