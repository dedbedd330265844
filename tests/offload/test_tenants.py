"""Engines of two tenants on one store: each gets what the operator gave it, and it is counted."""

import pytest

from kvferry.catalog.base import GRACE_S, Commit, Quota
from kvferry.catalog.memory import MemoryCatalog
from kvferry.config import Config
from kvferry.keys import tenant_id
from kvferry.metrics import Metrics
from kvferry.offload.space.growth import Growth
from kvferry.offload.space.room import Room, unpack
from kvferry.pages.facts import Asked
from kvferry.pages.memory import Medium, MemoryPages
from kvferry.testing.clock import ManualClock
from kvferry.testing.runner import PromptRunner
from tests.offload.parts import Bench, make_part

PART = make_part()
SEGMENTS_MAX, SEGMENT_BYTES = 8, 1 << 16
LEASE_S = 60.0
ONE, OTHER = tenant_id("one"), tenant_id("other")


class Engine:
    """The space half of one, and its metrics."""

    def __init__(self, store, tenant: bytes):
        self.metrics, self._catalog = Metrics(), store.catalog
        files = PromptRunner(store.clock)
        growth = Growth(store.catalog, store.pages, files, store.clock, self.metrics, 0.0)
        self.room = Room(
            store.catalog, store.pages, store.facts, growth, store.clock, self.metrics, tenant
        )
        self._name, self._stored_count = tenant, 0

    def store(self, count: int) -> int:
        """Returns how many pages it got slots for."""
        slots = unpack(self.room.reserve(PART, count, LEASE_S).packed)
        keys = [self._name + (self._stored_count + i).to_bytes(16, "big") for i in range(count)]
        self._stored_count += len(slots)
        commits = [Commit(k, bytes(32), 0, s, 0, 2) for k, s in zip(keys, slots, strict=False)]
        self._catalog.commit(PART.namespace, commits)
        return len(slots)

    def present(self, count: int) -> int:
        """How many of its first pages are there."""
        keys = [self._name + index.to_bytes(16, "big") for index in range(count)]
        return sum(hit is not None for hit in self._catalog.lookup(PART.namespace, keys))


class Store:
    def __init__(self):
        self.clock = ManualClock()
        asked = Asked(SEGMENTS_MAX * SEGMENT_BYTES, 4096, SEGMENT_BYTES)
        self.pages = MemoryPages(Medium(), self.clock, asked)
        self.facts = self.pages.open()
        self.catalog = MemoryCatalog(self.clock)
        self.catalog.open(self.facts.store_id, self.facts.capacity_bytes, SEGMENT_BYTES)


@pytest.fixture
def store():
    return Store()


def flood(store, engine: Engine, rounds: int) -> None:
    for _ in range(rounds):
        engine.store(20)
        engine.room.collect([(PART.namespace, 20)])
        store.clock.advance(GRACE_S)


def test_a_flood_leaves_another_what_it_is_guaranteed(store):
    store.catalog.set_quotas([Quota(ONE, 4)])
    one, other = Engine(store, ONE), Engine(store, OTHER)
    held = one.store(12)
    segments = {stats.share.tenant: stats.segment_count for stats in store.catalog.stats().shares}
    assert segments[ONE] == 4
    flood(store, other, 40)
    assert one.present(held) == held > 0
    assert other.metrics.value("kvferry_evictions_total") > 0


def test_a_maximum_is_kept_and_counted(store):
    store.catalog.set_quotas([Quota(ONE, 0, 2)])
    one = Engine(store, ONE)
    flood(store, one, 10)
    (share,) = store.catalog.stats().shares
    assert share.segment_count == 2
    assert one.metrics.value("kvferry_quota_refusals_total") > 0
    assert one.metrics.value("kvferry_quota_evictions_total") > 0


def test_what_lapses_is_counted(store):
    store.catalog.set_quotas([Quota(ONE, ttl_s=60.0)])
    one = Engine(store, ONE)
    count = one.store(5)
    store.clock.advance(100.0)
    one.room.collect()
    assert one.metrics.value("kvferry_pages_lapsed_total") == count == 5


def test_a_planner_takes_slots_of_its_tenant():
    bench = Bench(Config(pages="memory:", capacity_bytes=1 << 30, tenant="one"))
    bench.agree()
    bench.begin("a", list(range(64)))
    (share,) = bench.catalog.stats().shares
    assert share.share.tenant == ONE
