"""What is told of the store is so: never early, never twice, and gone when it is gone."""

import pytest

from kvferry.catalog.base import Commit, Space
from kvferry.catalog.memory import MemoryCatalog
from kvferry.errors import UnavailableError
from kvferry.metrics import Metrics
from kvferry.offload.scheduler.announcer import REVIEW_MAX, Announcer, Words
from kvferry.testing.clock import ManualClock

from .parts import PlainRequest, make_part

PART = make_part()
SLOTS = 16
SPACE = Space(PART.namespace, SLOTS, 4096, slice_count=1, chunk_tokens=8, description="")
STORE_S = 60.0
SAID_MAX = 8
REQUEST = PlainRequest("request", list(range(64)))
KEYS = [bytes([number]) * 32 for number in range(1, 40)]


class Counting(MemoryCatalog):
    """Knows how often it was asked, and can be down."""

    is_down = False
    asked_count = 0

    def present(self, namespace, keys):
        if self.is_down:
            raise UnavailableError("catalog.server", "it is down")
        self.asked_count += len(keys)
        return super().present(namespace, keys)


class Rig:
    def __init__(self):
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.catalog = Counting(self.clock)
        self.catalog.open(b"s" * 16, 1 << 20, SLOTS * 4096)
        self.catalog.attach(SPACE)
        self.announcer = Announcer(
            self.catalog, self.clock, self.metrics, describe, STORE_S, SAID_MAX
        )

    def plan(self, first: int, count: int = 1) -> None:
        self.announcer.plan(REQUEST, PART, first, KEYS[first : first + count])

    def store(self, first: int, count: int = 1) -> None:
        """What a plan would lead to."""
        if len(slots := self.catalog.reserve(SPACE.namespace, count, 60.0)) < count:
            assert self.catalog.grown(self.catalog.grow(SPACE.namespace))
            slots += self.catalog.reserve(SPACE.namespace, count - len(slots), 60.0)
        self.catalog.commit(
            SPACE.namespace,
            [Commit(KEYS[first + i], bytes(32), 0, slot, 0, 1) for i, slot in enumerate(slots)],
        )

    def evict(self, index: int) -> None:
        (hit,) = self.catalog.lookup(SPACE.namespace, [KEYS[index]])
        assert self.catalog.evict(SPACE.namespace, [(KEYS[index], hit.generation)]) == 1

    def told(self) -> list[tuple[str, int]]:
        self.announcer.review()
        return self.announcer.take()

    def counted(self, outcome: str) -> int:
        return self.metrics.snapshot().get("kvferry_events_total", {}).get(outcome, 0)


def describe(request, part, chunk_index):
    assert (request, part) == (REQUEST, PART)
    return Words(("stored", chunk_index), ("removed", chunk_index)) if chunk_index < 30 else None


@pytest.fixture
def rig():
    return Rig()


def test_a_chunk_is_told_when_any_engine_can_read_it_and_not_before(rig):
    rig.plan(0, 2)
    assert rig.told() == []
    rig.store(0)
    assert rig.announcer.take() == [], "nobody has looked yet"
    assert rig.told() == [("stored", 0)]
    rig.store(1)
    assert rig.told() == [("stored", 1)]
    assert rig.told() == []


def test_a_chunk_that_is_gone_is_told_once(rig):
    rig.plan(0, 3)
    rig.store(0, 3)
    assert rig.told() == [("stored", index) for index in range(3)]
    rig.evict(1)
    assert rig.told() == [("removed", 1)]
    assert rig.told() == []
    rig.plan(1)
    rig.store(1)
    assert rig.told() == [("stored", 1)], "stored again"


def test_a_chunk_that_two_requests_store_is_told_once(rig):
    for _ in range(2):
        rig.plan(0)
    rig.store(0)
    assert rig.told() == [("stored", 0)]
    rig.plan(0)
    assert rig.told() == []


def test_a_store_that_was_dropped_is_not_mentioned(rig):
    rig.plan(0)
    rig.clock.advance(STORE_S)
    assert rig.told() == []
    assert rig.counted("dropped") == 1
    rig.store(0)
    assert rig.told() == [], "somebody else has stored it"


def test_a_cleared_segment_takes_all_of_it(rig):
    rig.plan(0, 3)
    rig.store(0, 3)
    rig.told()
    for number in rig.catalog.segments():
        rig.catalog.shrunk(number)
    assert sorted(rig.told()) == [("removed", index) for index in range(3)]


def test_while_the_catalog_is_down_nothing_is_told_and_afterwards_all_of_it(rig):
    rig.plan(0, 2)
    rig.store(0, 2)
    assert rig.told() == [("stored", 0), ("stored", 1)]
    rig.plan(2)
    rig.store(2)
    rig.evict(0)
    rig.catalog.is_down = True
    with pytest.raises(UnavailableError):
        rig.announcer.review()
    assert rig.announcer.take() == []
    rig.catalog.is_down = False
    assert sorted(rig.told()) == [("removed", 0), ("stored", 2)]


def test_new_namespaces_take_everything(rig):
    rig.plan(0, 2)
    rig.store(0)
    assert rig.told() == [("stored", 0)]
    rig.announcer.forget()
    assert rig.announcer.take() == [("removed", 0)]
    rig.store(1)
    assert rig.told() == []


def test_who_is_forgotten_is_said_to_be_gone(rig):
    for first in (0, SAID_MAX):
        rig.plan(first, 4)
        rig.plan(first + 4, 4)
        rig.store(first, 8)
        told = rig.told()
    assert told[:8] == [("stored", SAID_MAX + index) for index in range(8)]
    assert told[8:] == [("removed", index) for index in range(8)]
    assert rig.counted("stored") - rig.counted("removed") == SAID_MAX


def test_what_is_planned_does_not_grow_without_end(rig):
    rig.plan(0, SAID_MAX + 3)
    assert rig.counted("dropped") == 3
    rig.store(0, SAID_MAX + 3)
    assert rig.told() == [("stored", index) for index in range(3, SAID_MAX + 3)]


def test_what_the_engine_has_no_words_for_is_not_asked_about(rig):
    rig.plan(30, 3)
    assert rig.told() == []
    assert rig.catalog.asked_count == 0


def test_each_round_asks_about_few_and_all_have_their_turn(rig, monkeypatch):
    monkeypatch.setattr("kvferry.offload.scheduler.announcer.REVIEW_MAX", 2)
    assert REVIEW_MAX > 2
    rig.plan(0, 6)
    rig.store(0, 6)
    told = [word for _ in range(3) for word in rig.told()]
    assert told == [("stored", index) for index in range(6)]
    rig.evict(5)
    asked_count = rig.catalog.asked_count
    assert [word for _ in range(3) for word in rig.told()] == [("removed", 5)]
    assert rig.catalog.asked_count - asked_count == 6
