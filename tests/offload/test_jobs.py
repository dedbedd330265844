"""The worker half: a load ends once, by its deadline, with exactly what it could deliver; a store
never takes what the engine has overwritten."""

import hashlib

import pytest

from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.runner import Runner
from kvferry.device.staging import Staging
from kvferry.layout import Address, Placement, Region
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Identity, Load, LocalPart, Plan, Span, Store
from kvferry.offload.worker.jobs import Jobs
from kvferry.offload.worker.load_jobs import LoadJobs
from kvferry.offload.worker.mover import Mover
from kvferry.offload.worker.ranks import RankPart
from kvferry.offload.worker.store_jobs import StoreJobs
from kvferry.offload.worker.trial import Trial
from kvferry.pages.base import Outcome
from kvferry.pages.facts import Asked
from kvferry.pages.header import Digest
from kvferry.pages.memory import Medium, MemoryPages
from kvferry.testing.clock import ManualClock
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.staging import Buffer
from tests.offload.parts import CONFIG, make_part

BLOCK_BYTES = 32
PART = make_part()  # two heads, chunks of two blocks
NAMES = ((0, 0, PART.namespace),)
BLOCKS = 40


class Worker:
    """One rank over memory backends, its mover and runner stepped by hand."""

    def __init__(self, staging_slots: int = 8, reads_max: int = 8, digest: Digest | None = None):
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.medium = Medium()
        self.pages = MemoryPages(self.medium, self.clock, Asked(1 << 20, 4096, 1 << 18))
        self.pages.open()
        self.pages.create_segment(1, PART.namespace, PART.geometry)
        self.memory = Buffer(BLOCKS * 2 * BLOCK_BYTES)
        region = Region(
            "layer",
            self.memory.address,
            BLOCKS,
            1,
            2,
            1,
            BLOCK_BYTES,
            2 * BLOCK_BYTES,
            BLOCK_BYTES,
            BLOCK_BYTES,
        )
        self.copier = ReferenceCopier([region], PART.geometry, digest=digest)
        part = RankPart(
            LocalPart(PART, (region,), Placement(0, 2)), self.copier, bytes(16), PART.namespace
        )
        self.parts = [part]
        self.staging = Staging(staging_slots * part.extent_bytes, part.extent_bytes)
        self.staging.open()
        self.pages.register(self.staging.address, self.staging.length_bytes)
        loads = LoadJobs(self.pages, self.staging, self.clock, self.metrics, reads_max)
        stores = StoreJobs(self.pages, self.staging, self.clock, self.metrics)
        self.runner = Runner(self.clock, self.metrics)
        self.mover = Mover(
            CONFIG,
            self.clock,
            self.metrics,
            MemoryCatalog(self.clock),
            self.pages,
            self.runner,
            loads,
            stores,
            Trial(self.pages, self.staging, self.runner, self.clock, [part]),
        )
        identity = Identity(0, 1, 0, bytes(16), (PART,))
        self.jobs = Jobs(
            CONFIG,
            self.clock,
            self.metrics,
            identity,
            [part],
            self.staging,
            loads,
            stores,
            self.mover,
        )
        self.jobs.before_step(Plan(NAMES))
        self.jobs.report()

    def fill(self, block: int, name: str) -> None:
        content = hashlib.shake_128(name.encode()).digest(2 * BLOCK_BYTES)
        start = block * len(content)
        self.memory.view[start : start + len(content)] = content

    def holds(self, block: int, name: str) -> bool:
        start = block * 2 * BLOCK_BYTES
        expected = hashlib.shake_128(name.encode()).digest(2 * BLOCK_BYTES)
        return bytes(self.memory.view[start : start + 2 * BLOCK_BYTES]) == expected

    def store(self, blocks: tuple[int, ...], then_overwrite: tuple[int, ...] = ()) -> None:
        """A step that stores chunks, and the next step's fence."""
        self.jobs.before_step(Plan(NAMES, stores=(Store(span_of(blocks), 60.0),)))
        self.jobs.after_forward(False)
        self.jobs.before_step(Plan(NAMES, overwritten=then_overwrite))
        for block in then_overwrite:
            self.fill(block, "overwritten")

    def load(self, blocks: tuple[int, ...], start: int = 0, deadline_s: float = 10.0) -> None:
        end = len(blocks) * PART.block_tokens
        load = Load("r", (span_of(blocks),), start, end, deadline_s)
        self.jobs.before_step(Plan(NAMES, loads=(load,)))
        self.jobs.after_forward(False)

    def work(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            self.mover.step()
            self.runner.step()


def span_of(blocks: tuple[int, ...]) -> Span:
    """Chunks 0, 1, ... in slots 0, 1, ... of segment 1."""
    count = len(blocks) // 2
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(count)]
    slots = [SLOT.pack(*Address(1, i), bytes([i]) * 16) for i in range(count)]
    return Span(0, 0, bytes(32), b"".join(keys), b"".join(slots), blocks)


@pytest.fixture
def worker():
    worker = Worker()
    for block in range(1, 9):
        worker.fill(block, f"b{block}")
    return worker


@pytest.fixture
def stored(worker):
    """Four chunks are on storage: blocks 1 to 8."""
    worker.store(tuple(range(1, 9)))
    worker.work()
    return worker


def test_a_load_brings_back_what_was_stored(stored):
    stored.load(tuple(range(11, 19)))
    assert stored.jobs.collect().done == frozenset()
    stored.work()
    finished = stored.jobs.collect()
    assert (finished.done, finished.failed) == ({"r"}, frozenset())
    assert all(stored.holds(10 + i, f"b{i}") for i in range(1, 9))
    assert stored.jobs.report().loaded_tokens == 32
    assert stored.jobs.collect().done == frozenset()
    assert stored.jobs.is_idle()


def test_blocks_that_the_engine_had_are_left_alone(stored):
    stored.fill(11, "mine")
    stored.load(tuple(range(11, 19)), start=4)
    stored.work()
    assert stored.holds(11, "mine")
    assert stored.holds(12, "b2")


def test_a_bad_page_fails_its_blocks_and_all_later_ones(stored):
    page = stored.medium.segments[1].slots[2]
    page[5000] ^= 1
    stored.load(tuple(range(11, 19)))
    stored.work()
    finished = stored.jobs.collect()
    assert finished.failed == {"r"}
    assert finished.failed_blocks == set(range(15, 19))
    assert all(stored.holds(10 + i, f"b{i}") for i in range(1, 5))
    bad = hashlib.sha256(bytes([2])).digest()
    assert stored.jobs.report().failed_keys == ((PART.namespace, bad),)
    assert stored.metrics.value("kvferry_load_failures_total", reason=Outcome.CORRUPT.value) == 1


def test_a_load_past_its_deadline_fails_and_keeps_its_staging_until_the_read_is_back(stored):
    stored.load(tuple(range(11, 19)), deadline_s=1.0)
    stored.mover.step = lambda: None  # hangs
    stored.jobs._loads.advance()
    out = stored.staging.taken_count
    stored.clock.advance(1.5)
    finished = stored.jobs.collect()
    assert finished.failed_blocks == set(range(11, 19))
    assert stored.staging.taken_count == out > 0
    del stored.mover.step
    stored.work()
    assert stored.staging.taken_count == 0
    assert stored.jobs.collect().done == frozenset()
    assert not any(stored.holds(10 + i, f"b{i}") for i in range(1, 9))


def test_loads_go_on_with_little_staging():
    worker = Worker(staging_slots=2)
    for block in range(1, 9):
        worker.fill(block, f"b{block}")
    worker.store(tuple(range(1, 9)))
    worker.work(20)
    worker.load(tuple(range(11, 19)))
    worker.work(20)
    assert worker.jobs.collect().failed == frozenset()
    assert all(worker.holds(10 + i, f"b{i}") for i in range(1, 9))


def test_few_reads_are_out_at_a_time():
    """However much staging there is: bytes that wait in it for long leave the processor's cache."""
    worker = Worker(staging_slots=8, reads_max=2)
    for block in range(1, 9):
        worker.fill(block, f"b{block}")
    worker.store(tuple(range(1, 9)))
    worker.work(20)
    batches = []
    submit_reads = worker.pages.submit_reads
    worker.pages.submit_reads = lambda extents: (
        batches.append(len(extents)) or submit_reads(extents)
    )
    worker.load(tuple(range(11, 19)))
    worker.work(20)
    assert batches == [2, 2]
    assert worker.jobs.collect().failed == frozenset()
    assert all(worker.holds(10 + i, f"b{i}") for i in range(1, 9))


def test_a_reset_fails_loads_under_way_and_those_that_nobody_collected(stored):
    stored.load(tuple(range(11, 19)))
    stored.work()
    stored.jobs.before_step(Plan(NAMES, drop_stores=True))
    assert stored.jobs.collect().failed == {"r"}
    stored.load(tuple(range(11, 19)))
    stored.jobs.before_step(Plan(NAMES, drop_stores=True))
    assert stored.jobs.collect().failed_blocks == set(range(11, 19))
    stored.work()
    assert stored.jobs.is_idle()


def test_the_fence_gathers_before_blocks_are_overwritten(worker):
    worker.store(tuple(range(1, 9)), then_overwrite=tuple(range(1, 9)))
    worker.work()
    worker.load(tuple(range(11, 19)))
    worker.work()
    assert worker.jobs.collect().failed == frozenset()
    assert all(worker.holds(10 + i, f"b{i}") for i in range(1, 9))


def test_copies_come_after_what_the_engine_has_given_the_device(stored, monkeypatch):
    """Without that a gather takes what was in the blocks before the forward, and a scatter writes
    into blocks that a forward still reads."""
    calls = []
    for name in ("order_gathers", "submit_gather", "order_scatters", "submit_scatter"):
        verb = getattr(stored.copier, name)
        monkeypatch.setattr(
            stored.copier, name, lambda *a, name=name, verb=verb: calls.append(name) or verb(*a)
        )
    stored.store((9, 10))
    stored.work()
    stored.load((11, 12))
    stored.work()
    assert calls == ["order_gathers", "submit_gather", "order_scatters", "submit_scatter"]


def test_a_load_ends_when_its_last_scatter_does(stored):
    """Until then its blocks and its staging are the copier's, deadline or not."""
    stored.load(tuple(range(11, 19)), deadline_s=1.0)
    stored.copier.is_stuck = True
    stored.work()
    stored.clock.advance(1.5)
    assert stored.jobs.collect().done == frozenset()
    assert stored.staging.taken_count == 4
    stored.copier.is_stuck = False
    finished = stored.jobs.collect()
    assert (finished.done, finished.failed) == ({"r"}, frozenset())
    assert stored.jobs.is_idle()


def test_what_the_fence_cannot_gather_is_given_up():
    worker = Worker(staging_slots=2)
    worker.store(tuple(range(1, 9)), then_overwrite=tuple(range(1, 9)))
    worker.work(20)
    assert worker.metrics.value("kvferry_store_drops_total", reason="fenced") == 3
    assert sorted(worker.medium.segments[1].slots) == [0]
    assert worker.jobs.is_idle()


def test_a_gather_that_comes_too_late_is_not_written(worker):
    worker.copier.is_stuck = True
    worker.store((1, 2), then_overwrite=(1,))
    worker.copier.is_stuck = False
    worker.work()
    assert worker.medium.segments[1].slots == {}
    assert worker.jobs.is_idle()


def test_a_closed_runner_loses_commits_but_nothing_else(worker):
    worker.runner.close(0.0)
    worker.store((1, 2))
    worker.work()
    assert worker.metrics.value("kvferry_store_drops_total", reason="unavailable") == 1
    assert worker.jobs.is_idle()


def test_a_gather_that_ends_while_others_are_submitted_is_written_too(worker):
    """The engine's thread takes copies as well: what it adds must not get lost with its staging."""
    for block in range(1, 9):
        worker.fill(block, f"block {block}")
    submit_writes = worker.pages.submit_writes

    def submit_late(extents):
        number = submit_writes(extents)
        worker.pages.submit_writes = submit_writes
        worker.store((5, 6, 7, 8))
        worker.mover.take_copies()
        return number

    worker.store((1, 2, 3, 4))
    worker.pages.submit_writes = submit_late
    worker.work(20)
    assert worker.staging.taken_count == 0
    assert worker.jobs.is_idle()


def test_a_load_whose_scatter_cannot_be_submitted_ends(worker):
    """The mover stands aside then, and the engine must not wait for the load for ever."""
    for block in range(1, 9):
        worker.fill(block, f"block {block}")
    worker.store((1, 2, 3, 4))
    worker.work(20)

    def refuse(pieces):
        raise RuntimeError("no memory left")

    worker.copier.submit_scatter = refuse
    worker.load((11, 12, 13, 14))
    with pytest.raises(RuntimeError):
        worker.work(20)
    worker.mover._stand_aside(RuntimeError("no memory left"))
    finished = worker.jobs.collect()
    assert finished.failed == finished.done != frozenset()
