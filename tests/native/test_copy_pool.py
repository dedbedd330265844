"""The copy pool: the fence must mean that blocks were copied, for each job exactly once."""

import os
import threading

import pytest

from kvferry import _native

from .buffers import Buffer
from .copy_model import Engine, Shape, noise

BLOCK_BYTES = 256
BLOCKS = 64
SLICE_BYTES = 4096
ENGINE = Engine(
    (Shape(0, 1, 1, BLOCK_BYTES, BLOCK_BYTES, 0, BLOCK_BYTES),), 1, BLOCK_BYTES * BLOCKS
)
DEADLINE_S = 20.0


@pytest.fixture
def pool():
    pool = _native.CopyPool(2)
    yield pool
    pool.close()


def pieces(extents: Buffer, count: int) -> list:
    return [([i % BLOCKS], extents.address + i * SLICE_BYTES) for i in range(count)]


def drain(pool) -> list[int]:
    done = pool.poll()
    assert pool.poll() == []
    return sorted(done)


def test_finish_is_a_fence_and_poll_returns_each_job_once(pool):
    memory, extents = noise(ENGINE.memory_bytes, 1), Buffer(BLOCKS * SLICE_BYTES)
    block_map = ENGINE.block_map(memory, SLICE_BYTES)
    gathers = [pool.submit(block_map, True, [piece]) for piece in pieces(extents, BLOCKS)]
    assert pool.finish(gathers, DEADLINE_S)
    before = bytes(memory.view)
    memory.view[:] = bytes(len(memory.view))
    copy = pool.submit(block_map, False, pieces(extents, BLOCKS))
    assert pool.finish([copy], DEADLINE_S)
    assert memory.view == before
    assert drain(pool) == [*gathers, copy] == list(range(1, BLOCKS + 2))


def test_finish_jumps_the_queue():
    """One thread is far behind: what a preemption needs now is copied by who needs it."""
    size_bytes = 64 << 20
    memory, extents = Buffer(size_bytes), Buffer(size_bytes + 4096)
    big = Engine((Shape(0, 1, 1, size_bytes, size_bytes, 0, size_bytes),), 1, size_bytes)
    small_extent = Buffer(SLICE_BYTES)
    pool = _native.CopyPool(1)
    backlog = pool.submit(
        big.block_map(memory, size_bytes + 4096), True, [([0], extents.address)] * 40
    )
    urgent = pool.submit(ENGINE.block_map(memory, SLICE_BYTES), True, [([0], small_extent.address)])
    assert pool.finish([urgent], DEADLINE_S)
    assert drain(pool) == [urgent]
    assert not pool.finish([backlog, urgent], 0.0)
    pool.close()
    assert drain(pool) == [backlog]


def test_finish_of_what_is_done_or_unknown_is_true(pool):
    job = pool.submit(ENGINE.block_map(Buffer(ENGINE.memory_bytes), SLICE_BYTES), True, [])
    assert pool.finish([job, 99], 0.0)
    assert drain(pool) == [job]
    assert pool.finish([job], 0.0)


def test_many_threads_may_submit_and_finish(pool):
    memory, extents = noise(ENGINE.memory_bytes, 1), Buffer(BLOCKS * SLICE_BYTES)
    block_map = ENGINE.block_map(memory, SLICE_BYTES)
    outcomes = []

    def use(share: list):
        jobs = [pool.submit(block_map, True, [piece]) for piece in share]
        outcomes.append(pool.finish(jobs, DEADLINE_S))

    shares = [pieces(extents, BLOCKS)[i::4] for i in range(4)]
    threads = [threading.Thread(target=use, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4
    assert drain(pool) == list(range(1, BLOCKS + 1))
    for i in range(BLOCKS):
        block = extents.view[i * SLICE_BYTES + 64 :][:BLOCK_BYTES]
        assert block == memory.view[i * BLOCK_BYTES :][:BLOCK_BYTES]


def test_close_finishes_what_was_submitted_and_refuses_more():
    memory, extents = noise(ENGINE.memory_bytes, 1), Buffer(BLOCKS * SLICE_BYTES)
    block_map = ENGINE.block_map(memory, SLICE_BYTES)
    pool = _native.CopyPool(1)
    jobs = [pool.submit(block_map, True, [piece]) for piece in pieces(extents, BLOCKS)]
    pool.close()
    pool.close()
    assert drain(pool) == jobs
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(block_map, True, [])


def test_a_forked_child_is_refused_and_ends(pool):
    memory = Buffer(ENGINE.memory_bytes)
    block_map = ENGINE.block_map(memory, SLICE_BYTES)
    child = os.fork()
    if child == 0:
        try:
            pool.submit(block_map, True, [])
        except RuntimeError:
            pool.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_pool_needs_a_thread():
    with pytest.raises(ValueError, match="thread_count"):
        _native.CopyPool(0)
