"""Pages on 3FS through the emulated library: the contract, its faults, what it leaves behind."""

import errno
import os
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("kvferry._native")
from kvferry.errors import InternalError
from kvferry.layout import Address, PageGeometry
from kvferry.pages.base import Outcome, Overdue
from kvferry.pages.facts import Asked
from kvferry.testing.pages import GEOMETRY, HOME, NAMESPACE, PageStoreSuite
from kvferry.testing.staging import Buffer, Driver, page_id

from .usrbio_place import UsrbioPlace

PAGE = page_id("a")
DISORDER = {"reorder": 1, "fewer": 1, "implicit": 0.3, "delay_us": 300}
MIB = 1 << 20
PATIENCE_S = 20.0


class TestUsrbio(PageStoreSuite):
    @pytest.fixture
    def place(self, emulation):
        return UsrbioPlace(emulation)


class TestInDisorder(PageStoreSuite):
    """Completions late and in any order, waits that return some of them, begun before submit."""

    @pytest.fixture
    def place(self, emulation):
        emulation.configure(seed=3, **DISORDER)
        return UsrbioPlace(emulation)


@contextmanager
def opened(emulation, page_count=4, geometry=GEOMETRY, asked=None, **options):
    """A driver on a store with segment 1."""
    store = UsrbioPlace(emulation, **options).store(*[asked] if asked else [])
    store.open()
    store.create_segment(1, NAMESPACE, geometry)
    yield Driver(store, geometry, page_count)
    store.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_after_close_nothing_is_left(emulation):
    with opened(emulation) as driver:
        driver.write(PAGE, HOME)
        assert len(emulation.links()) == 1
        assert emulation.count("files") == 1
        before = _open_files()
    assert emulation.left_over() == []
    assert _open_files() < before


def test_memory_of_others_is_refused(emulation):
    with opened(emulation) as driver, pytest.raises(InternalError, match="allocate"):
        driver.store.register(Buffer(4096).address, 4096)


@pytest.mark.parametrize(
    ("fault", "number", "outcome"),
    [
        ("eio", errno.EIO, Outcome.IO_ERROR),
        ("eremoteio", errno.EREMOTEIO, Outcome.IO_ERROR),
        ("eintr", errno.EINTR, Outcome.IO_ERROR),
        ("enospc", errno.ENOSPC, Outcome.NO_SPACE),
    ],
)
def test_what_the_daemon_refuses_is_a_result_with_its_number(emulation, fault, number, outcome):
    with opened(emulation) as driver:
        before = emulation.count(fault)
        emulation.configure(**{fault: 1})
        result = driver.write(PAGE, HOME)
        assert (result.outcome, result.errno) == (outcome, number)
        assert emulation.count(fault) == before + 1
        if fault != "enospc":
            result = driver.read(PAGE, HOME).result
            assert (result.outcome, result.errno) == (outcome, number)
        emulation.configure()
        assert driver.write(PAGE, HOME).outcome is Outcome.OK
        assert driver.read(PAGE, HOME).result.outcome is Outcome.OK


def test_a_hole_is_absent_and_not_zeros(emulation):
    with opened(emulation) as driver:
        before = emulation.count("holes"), emulation.count("zeros")
        assert driver.read(PAGE, HOME).result.outcome is Outcome.ABSENT
        assert emulation.count("holes") == before[0] + 1
        assert emulation.count("zeros") == before[1], "an error, not zeros"


def test_a_late_completion_is_a_result_and_counts_as_overdue(emulation):
    with opened(emulation, io_deadline_s=0.05) as driver:
        driver.write(PAGE, HOME)
        emulation.configure(late=1, late_ms=300)
        read = driver.read(PAGE, HOME)
        assert read.result.outcome is Outcome.OK
        assert driver.store.overdue() == Overdue(0, 1)
        assert emulation.count("late") >= 1


@pytest.mark.parametrize("is_read", [True, False])
def test_a_completion_that_never_comes_holds_its_buffer_and_nothing_else(emulation, is_read):
    """Other I/O goes on, also where all that may be in flight is lost."""
    options = {"io_deadline_s": 0.05, "ring_bytes_max": 1, "read_thread_count": 1}
    store = UsrbioPlace(emulation, write_thread_count=1, **options).store()
    store.open()
    store.create_segment(1, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    driver.write(PAGE, HOME)
    before = emulation.count("lost")
    emulation.configure(lost=1)
    lost = driver.extent(PAGE, HOME, None, 1)
    driver.fill(lost)
    submit = store.submit_reads if is_read else store.submit_writes
    submit([lost])
    give_up_s = time.monotonic() + PATIENCE_S
    while store.overdue() != Overdue(1, 1):
        assert store.wait(0.05) == []
        assert time.monotonic() < give_up_s, store.overdue()
    assert emulation.count("lost") == before + 1
    emulation.configure()
    assert driver.write(page_id("b"), Address(1, 5)).outcome is Outcome.OK
    assert driver.read(page_id("b"), Address(1, 5)).result.outcome is Outcome.OK
    assert store.poll() == []
    dropped = emulation.count("dropped")
    store._pool.close(0.01)  # not five seconds
    store.close()
    assert emulation.count("dropped") == dropped + 1, "the end of its ring ends it"
    assert emulation.left_over() == []


@pytest.mark.parametrize("is_read", [True, False])
def test_a_buffer_comes_back_when_its_ring_is_ended(emulation, is_read):
    """Else staging would run dry after as many lost completions as it has slots."""
    options = {"io_deadline_s": 0.05, "ring_deadline_s": 0.3, "read_thread_count": 1}
    with opened(emulation, write_thread_count=1, **options) as driver:
        store = driver.store
        driver.write(PAGE, HOME)
        extent = driver.extent(PAGE, HOME, None, 1)
        driver.fill(extent)
        lost, rings = emulation.count("lost"), emulation.count("rings")
        emulation.configure(lost=1)
        job = (store.submit_reads if is_read else store.submit_writes)([extent])
        result = driver.one_result(job)
        assert (result.outcome, result.errno) == (Outcome.IO_ERROR, errno.ETIMEDOUT)
        assert emulation.count("lost") == lost + 1
        assert store.overdue() == Overdue(0, 1)
        emulation.configure()
        assert driver.write(page_id("b"), Address(1, 5)).outcome is Outcome.OK
        assert driver.read(page_id("b"), Address(1, 5)).result.outcome is Outcome.OK
        assert emulation.count("rings") == rings, "another one is in its place"
    assert emulation.left_over() == []


@pytest.mark.parametrize("strange", ["again", "foreign"])
def test_a_completion_that_nobody_waits_for_ends_nothing(emulation, strange):
    """Else the next I/O ends before its bytes are there, and they come into a buffer that is
    another page's by then."""
    with opened(emulation, read_thread_count=1, write_thread_count=1) as driver:
        before = emulation.count(strange)
        emulation.configure(seed=3, delay_us=3000, **{strange: 1})
        for number in range(20):
            page, home = page_id(str(number)), Address(1, number % 4)
            assert driver.write(page, home).outcome is Outcome.OK
            read = driver.read(page, home)
            assert read.result.outcome is Outcome.OK
            assert read.payloads == driver.expected(driver.extent(page, home))
        assert emulation.count(strange) > before
        emulation.configure()
    assert emulation.left_over() == []


def test_a_ring_that_cannot_be_waited_for_ends_at_its_deadline(emulation):
    """And costs no processor until then."""
    with opened(emulation, io_deadline_s=0.1, ring_deadline_s=0.5, read_thread_count=1) as driver:
        driver.write(PAGE, HOME)
        before = emulation.count("deaf")
        emulation.configure(deaf=errno.ENOTCONN, lost=1)
        assert driver.read(PAGE, HOME).result.errno == errno.ETIMEDOUT
        assert 0 < emulation.count("deaf") - before < 200
        emulation.configure()
        assert driver.read(PAGE, HOME).result.outcome is Outcome.OK
    assert emulation.left_over() == []


def test_a_daemon_that_gives_no_other_ring_fails_what_comes(emulation):
    options = {"io_deadline_s": 0.05, "ring_deadline_s": 0.1, "read_thread_count": 1}
    with opened(emulation, **options) as driver:
        driver.write(PAGE, HOME)
        emulation.configure(lost=1, refuse_rings=errno.ENOTCONN)
        assert driver.read(PAGE, HOME).result.errno == errno.ETIMEDOUT
        result = driver.read(PAGE, HOME).result
        assert (result.outcome, result.errno) == (Outcome.IO_ERROR, errno.ENOTCONN)
        emulation.configure()
        assert driver.read(PAGE, HOME).result.outcome is Outcome.OK
    assert emulation.left_over() == []


def test_an_extent_of_many_ios_is_one_result(emulation):
    """I/Os end at multiples of 4 MiB in the file, whatever the slices."""
    geometry = PageGeometry(slice_count=3, payload_bytes=3 * MIB, chunk_tokens=16)
    asked = Asked(64 * MIB, 64 << 10, 32 * MIB)
    emulation.configure(seed=5, **DISORDER)
    with opened(emulation, 2, geometry, asked) as driver:
        before = emulation.count("writes")
        assert driver.write(PAGE, Address(1, 1)).outcome is Outcome.OK
        start = 64 * 1024 + geometry.slot_bytes(64 * 1024)
        end = start + geometry.page_bytes
        assert emulation.count("writes") - before == -(-end // (4 * MIB)) - start // (4 * MIB)
        read = driver.read(PAGE, Address(1, 1))
        assert read.result.outcome is Outcome.OK
        assert read.payloads == driver.expected(driver.extent(PAGE, Address(1, 1)))


@pytest.mark.parametrize(
    ("payload_bytes", "alignment_bytes", "expected"),
    [
        (MIB - 4096, MIB, {1: 0, 2: 0, 4: 0, 8: 0}),
        (MIB, MIB, {1: 1, 2: 3, 4: 7, 8: 15}),
        (MIB, 4096, {1: 2, 2: 4, 4: 8, 8: 16}),
    ],
)
def test_what_ranks_that_share_a_chunk_of_3fs_cost(
    emulation, payload_bytes, alignment_bytes, expected
):
    """Writes of a part of a chunk, for a page of eight slices by so many ranks: docs/3fs.md."""
    geometry = PageGeometry(slice_count=8, payload_bytes=payload_bytes, chunk_tokens=16)
    asked = Asked(64 * MIB, alignment_bytes, 64 * MIB)
    counted = {}
    with opened(emulation, 1, geometry, asked) as driver:
        for rank_count in expected:
            before = emulation.count("partial_chunk_writes")
            share = 8 // rank_count
            for first in range(0, 8, share):
                written = driver.write(PAGE, Address(1, 1), range(first, first + share))
                assert written.outcome is Outcome.OK
            counted[rank_count] = emulation.count("partial_chunk_writes") - before
    assert counted == expected


def test_many_pages_by_all_threads_in_disorder(emulation):
    asked = Asked(64 * MIB, 4096, 8 * MIB)
    with opened(
        emulation, 64, GEOMETRY, asked, read_thread_count=8, write_thread_count=8
    ) as driver:
        emulation.configure(seed=11, eio=0.05, **DISORDER)
        before = emulation.count("eio")
        pages = [page_id(str(number)) for number in range(64)]
        extents = [driver.extent(p, Address(1, n), None, n) for n, p in enumerate(pages)]
        written = set()
        for _ in range(5):
            for extent in extents:
                driver.fill(extent)
            driver.store.submit_writes(extents)
            written |= {r.index for r in driver.results(64) if r.outcome is Outcome.OK}
            for extent in extents:
                driver.spoil(extent)
            driver.store.submit_reads(extents)
            for result in driver.results(64):
                assert result.outcome in (Outcome.OK, Outcome.IO_ERROR, Outcome.ABSENT)
                if result.outcome is Outcome.OK:
                    extent = extents[result.index]
                    assert driver.payloads(extent) == driver.expected(extent)
        assert emulation.count("eio") > before
        assert written == set(range(64))
    emulation.configure()
    assert emulation.left_over() == []


def test_a_forked_child_takes_nothing_from_its_parent(emulation):
    with opened(emulation) as driver:
        driver.write(PAGE, HOME)
        child = os.fork()
        if child == 0:
            try:
                driver.store.submit_reads([driver.extent(PAGE, HOME)])
            except RuntimeError:
                driver.store.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(emulation.links()) == 1
        assert driver.read(PAGE, HOME).result.outcome is Outcome.OK


def test_close_in_a_forked_child_does_not_call_the_library(emulation):
    """Threads that only the parent has may hold its locks: the child would hang."""
    with opened(emulation) as driver:
        driver.write(PAGE, HOME)
        child = os.fork()
        if child == 0:
            driver.store._descriptors._closing = lambda _: os._exit(3)
            driver.store.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert driver.read(PAGE, HOME).result.outcome is Outcome.OK
    assert emulation.left_over() == []
