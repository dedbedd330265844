"""A million I/Os, and a thousand processes that are killed, leave nothing behind on 3FS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvferry._native")
from kvferry.layout import Address, PageGeometry
from kvferry.pages import shared_memory
from kvferry.pages.base import Outcome
from kvferry.pages.facts import Asked
from kvferry.testing.pages import NAMESPACE
from kvferry.testing.staging import Driver, page_id

from .usrbio_place import UsrbioPlace

BATCH_COUNT = 256
GEOMETRY = PageGeometry(slice_count=1, payload_bytes=4096, chunk_tokens=16)
ASKED = Asked(64 << 20, 4096, 8 << 20)
WARM_COUNT = 20_000
LEAK_BYTES_MAX = 8 << 20
"""Eight bytes lost by each of a million I/Os."""

STARTS = """
import os, random, signal, sys, time
from pathlib import Path
from kvferry.testing.places import ASKED
from kvferry.clock import SystemClock
from kvferry.pages.usrbio import UsrbioPages

folder, library, count = sys.argv[1:]
chance = random.Random(5)
for number in range(int(count)):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        store = UsrbioPages(Path(folder), SystemClock(), ASKED, library=library,
                            read_thread_count=1, write_thread_count=1)
        store.open()
        store.allocate(1 << 20)
        os.write(said, b"open")
        signal.pause()
    os.close(said)
    if number % 2:
        time.sleep(chance.uniform(0, 0.02))  # at whatever it is doing
    else:
        assert os.read(heard, 4) == b"open"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(heard)
    print(child, flush=True)
"""


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _taken(emulation) -> dict[str, int]:
    return {
        "open files": _open_files(),
        "shared memory": len(list(shared_memory.SHARED_MEMORY.glob(f"kvferry-{os.getpid()}-*"))),
        "links": len(emulation.links()),
        "rings": emulation.count("rings"),
        "registered files": emulation.count("files"),
    }


def _move(driver: Driver, extents: list, io_count: int) -> None:
    """Writes and reads in turn, so that both kinds of threads are busy at once."""
    for _ in range(io_count // (2 * BATCH_COUNT) + 1):
        driver.store.submit_writes(extents[:BATCH_COUNT])
        driver.store.submit_reads(extents[BATCH_COUNT:])
        results = driver.results(2 * BATCH_COUNT)
        assert all(result.outcome is Outcome.OK for result in results)


@pytest.mark.parametrize("io_count", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_ios_by_eight_threads_leak_nothing(emulation, io_count):
    files_before = _open_files()
    store = UsrbioPlace(emulation, read_thread_count=4, write_thread_count=4).store(ASKED)
    store.open()
    store.create_segment(1, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY, 2 * BATCH_COUNT)
    extents = [
        driver.extent(page_id(str(slot)), Address(1, slot), None, slot)
        for slot in range(2 * BATCH_COUNT)
    ]
    for extent in extents:
        driver.fill(extent)
    store.submit_writes(extents)
    driver.results(len(extents))
    _move(driver, extents, min(WARM_COUNT, io_count))
    begun = emulation.count("reads") + emulation.count("writes")
    taken, resident_bytes = _taken(emulation), _resident_bytes()
    _move(driver, extents, io_count)
    assert emulation.count("reads") + emulation.count("writes") - begun >= io_count
    assert _taken(emulation) == taken
    assert _resident_bytes() - resident_bytes < LEAK_BYTES_MAX
    store.close()
    assert emulation.left_over() == []
    del driver  # it keeps the memory mapped, which holds a descriptor
    assert _open_files() == files_before


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_starts_that_are_killed_leave_nothing_behind(emulation, count):
    """Half of them at any moment of their start, the others with the store open."""
    place = UsrbioPlace(emulation)
    store = place.store()
    store.open()
    command = [sys.executable, "-c", STARTS, str(place.root), str(emulation.path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    killed = set(done.stdout.split())
    assert len(killed) == count
    again = place.store()
    again.open()
    again.close()
    left_over = [
        path.name
        for path in shared_memory.SHARED_MEMORY.glob("kvferry-*")
        if path.name.split("-")[1] in killed
    ]
    assert left_over == []
    store.close()
    assert emulation.left_over() == []
    assert [path.name for path in place.root.rglob("*.tmp")] == []
