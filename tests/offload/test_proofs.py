"""Where the copier proves pages nobody else computes checksums, and a page that it finds damaged is
what one is that the page store finds damaged: recomputed, evicted, counted."""

import hashlib

import pytest

from kvferry.layout import HEADER_BYTES
from kvferry.pages import memory
from kvferry.pages.base import Outcome
from tests.offload.test_jobs import PART, Worker

BLOCKS = tuple(range(11, 19))


def bad_key(chunk: int) -> bytes:
    return hashlib.sha256(bytes([chunk])).digest()


class ProvingWorker(Worker):
    """A worker whose copier proves pages; `page_digests`: what its page store computed itself."""

    def __init__(self, staging_slots: int = 8):
        super().__init__(staging_slots, digest=memory.digest)
        self.page_digests: list[bytes] = []
        self.evicted: list[list[tuple[bytes, bytes]]] = []
        self.pages._digest = self._digest
        self.mover.evict = lambda namespace, pages: self.evicted.append(pages)

    def _digest(self, data) -> int:
        if len(data) != HEADER_BYTES or not bytes(data).startswith(b"kvferry"):
            self.page_digests.append(bytes(data))
        return memory.digest(data)


@pytest.fixture
def worker():
    worker = ProvingWorker()
    for block in range(1, 9):
        worker.fill(block, f"b{block}")
    worker.store(tuple(range(1, 9)))
    worker.work()
    return worker


def flip(worker: Worker, chunk: int, offset_bytes: int) -> None:
    worker.medium.segments[1].slots[chunk][offset_bytes] ^= 1


def test_what_was_stored_comes_back_and_only_the_copier_computed_checksums(worker):
    worker.load(BLOCKS)
    worker.work()
    finished = worker.jobs.collect()
    assert (finished.done, finished.failed) == ({"r"}, frozenset())
    assert all(worker.holds(10 + i, f"b{i}") for i in range(1, 9))
    assert worker.page_digests == []


@pytest.mark.parametrize("chunk", range(4))
def test_a_damaged_page_fails_its_blocks_and_all_later_ones(worker, chunk):
    for block in BLOCKS:
        worker.fill(block, "old")
    flip(worker, chunk, HEADER_BYTES + 3)
    worker.load(BLOCKS)
    worker.work()
    finished = worker.jobs.collect()
    assert finished.failed == {"r"}
    assert finished.failed_blocks == set(BLOCKS[2 * chunk :])
    assert all(worker.holds(10 + i, f"b{i}") for i in range(1, 2 * chunk + 1))
    assert all(worker.holds(block, "old") for block in BLOCKS[2 * chunk :][:2])
    assert worker.jobs.report().failed_keys == ((PART.namespace, bad_key(chunk)),)
    assert worker.evicted == [[(bad_key(chunk), bytes([chunk]) * 16)]]
    assert worker.metrics.value("kvferry_load_failures_total", reason=Outcome.CORRUPT.value) == 1
    assert worker.jobs.is_idle()


def test_damage_to_a_header_is_found_by_the_page_store(worker):
    flip(worker, 0, 20)
    worker.load(BLOCKS)
    worker.work()
    assert worker.jobs.collect().failed_blocks == set(BLOCKS)
    assert worker.jobs.is_idle()


def test_a_page_that_is_written_carries_the_checksums_of_its_own_slices(worker):
    """Those of another would make each of its readers evict it."""
    worker.load(BLOCKS)
    reader = Worker()  # proves nothing itself
    reader.medium = worker.medium
    reader.pages._medium = worker.medium
    reader.load(BLOCKS)
    reader.work()
    assert reader.jobs.collect().failed == frozenset()
    assert all(reader.holds(10 + i, f"b{i}") for i in range(1, 9))


def test_a_load_that_fails_on_the_device_gives_its_staging_back():
    worker = ProvingWorker(staging_slots=2)
    for block in range(1, 9):
        worker.fill(block, f"b{block}")
    worker.store(tuple(range(1, 9)))
    worker.work(20)
    for chunk in range(4):
        flip(worker, chunk, HEADER_BYTES)
    worker.load(BLOCKS)
    worker.work(20)
    assert worker.jobs.collect().failed_blocks == set(BLOCKS)
    assert worker.staging.taken_count == 0
    assert worker.jobs.is_idle()
