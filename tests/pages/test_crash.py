"""A process may be killed at any instruction: what it leaves is whole, or a miss."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.checksum import checksum_reference
from kvferry.layout import Address, PageGeometry
from kvferry.pages import files
from kvferry.pages.base import Extent, Outcome
from kvferry.pages.owner import StoreOwnership
from kvferry.pages.segments import SegmentFiles
from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import GEOMETRY, HOME, NAMESPACE
from kvferry.testing.places import ASKED
from kvferry.testing.staging import Driver, page_id

CALLS = (
    "open",
    "close",
    "mkdir",
    "link",
    "unlink",
    "replace",
    "rename",
    "fsync",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
)
LEASE_S = 10.0
SEEDS = itertools.count()
LARGE = PageGeometry(slice_count=2, payload_bytes=30_000, chunk_tokens=16)
SLOT_COUNT = 14


def _in_child(action: Callable[[], None]) -> int:
    """Runs `action` in a process of its own; returns how that ended, as `os.waitpid` says."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def _is_killed(status: int) -> bool:
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def _killed_before(step: int, action: Callable[[], None]) -> bool:
    """Runs `action` in a process that is killed before its call number `step` of the system's."""
    calls = itertools.count(1)

    def armed(call):
        def count_and_call(*args, **kwargs):
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return count_and_call

    def run():
        for name in CALLS:
            setattr(os, name, armed(getattr(os, name)))
        action()

    return _is_killed(_in_child(run))


def _files(root: Path, is_sparse: bool = False) -> SegmentFiles:
    """Each one a process with random names of its own. `is_sparse`: as on 3FS."""
    clock = ManualClock(os.getpid() * 1000 + next(SEEDS))
    return SegmentFiles(root, ASKED, clock, checksum_reference, is_sparse=is_sparse)


def _create(root: Path, is_sparse: bool = False) -> SegmentFiles:
    store = _files(root, is_sparse)
    store.open()
    store.create(1, NAMESPACE, GEOMETRY)
    return store


def _require_clean(root: Path, expected: set[str]) -> None:
    """After a while, whoever opens the store finds what is expected and nothing else."""
    for path in root.rglob("*.*"):
        then = path.stat().st_mtime - 2 * files.TEMPORARY_AGE_S
        os.utime(path, (then, then))
    _files(root).open()
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == expected


@pytest.mark.parametrize("is_sparse", [False, True], ids=["posix", "usrbio"])
def test_killed_while_making_a_store_and_a_segment(tmp_path, is_sparse):
    seen = set()
    for step in itertools.count(1):
        root = tmp_path / str(step)
        was_killed = _killed_before(step, lambda root=root: _create(root, is_sparse))
        store = _files(root, is_sparse)
        store.open()
        found = store.read(1)
        seen.add(found is Outcome.ABSENT)
        assert found is Outcome.ABSENT or found.slot_count > 0
        _create(root, is_sparse)
        assert store.path(1).stat().st_size == ASKED.segment_bytes
        _require_clean(root, {"superblock.json", "segments/00000001.seg"})
        assert store.used_bytes() <= ASKED.segment_bytes + (64 << 10)
        if not was_killed:
            break
    assert step > (11 if is_sparse else 12) and seen == {True, False}


def test_killed_while_deleting_a_segment(tmp_path):
    for step in itertools.count(1):
        root = tmp_path / str(step)
        store = _create(root)
        was_killed = _killed_before(step, lambda store=store: store.delete(1))
        assert store.read(1) is Outcome.ABSENT or store.read(1).slot_count > 0
        store.delete(1)
        _require_clean(root, {"superblock.json"})
        if not was_killed:
            break
    assert step > 4


def test_killed_owner_at_any_step_is_replaced_after_its_lease(tmp_path):
    def tenure(root):
        owner = StoreOwnership(root, "a", ManualClock(1))
        owner.acquire(LEASE_S)
        owner.beat()
        owner.release()

    for step in itertools.count(1):
        root = tmp_path / str(step)
        root.mkdir()
        was_killed = _killed_before(step, lambda root=root: tenure(root))
        other = StoreOwnership(root, "b", ManualClock(2))
        assert other.acquire(LEASE_S) is True
        other.beat()
        assert other.holds
        if not was_killed:
            break
    assert step > 12


@pytest.fixture(params=["posix", "usrbio"])
def make_place(request, tmp_path):
    """Makes a place over files; `options` are for `posix`."""
    if request.param == "posix":
        module = pytest.importorskip("kvferry.testing.posix_place")
        return lambda **options: module.PosixPlace(tmp_path, ManualClock(), **options)
    module = pytest.importorskip("tests.pages.usrbio_place")
    emulation = request.getfixturevalue("emulation")
    return lambda **_: module.UsrbioPlace(emulation)


def test_killed_in_the_middle_of_an_extent(make_place):
    place = make_place(direct_io="off")
    store = place.store()
    store.open()
    store.create_segment(1, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    old, new = page_id("a", generation=1), page_id("a", generation=2)
    driver.write(new, HOME)
    content = place.page(HOME)
    driver.write(old, HOME)
    before = place.page(HOME)

    def half(cut):
        place.replace_page(HOME, content[:cut] + before[cut:])
        os.kill(os.getpid(), signal.SIGKILL)

    last = len(content) - (GEOMETRY.padded_payload_bytes - GEOMETRY.payload_bytes) - 1
    cuts = [0, 1, 4096, GEOMETRY.slice_bytes, last, *random.Random(5).sample(range(last), 20)]
    for cut in cuts:
        assert _is_killed(_in_child(lambda cut=cut: half(cut)))
        assert driver.read(new, HOME).result.outcome is not Outcome.OK
        place.replace_page(HOME, before)
    place.replace_page(HOME, content)
    assert driver.read(new, HOME).result.outcome is Outcome.OK
    store.close()


def test_killed_while_native_threads_write(make_place):
    place = make_place()
    store = place.store()
    store.open()
    store.create_segment(1, NAMESPACE, LARGE)
    driver = Driver(store, LARGE, SLOT_COUNT)
    outcomes = []
    for generation in range(6):
        extents = [
            driver.extent(page_id(str(slot), generation), Address(1, slot), None, slot)
            for slot in range(SLOT_COUNT)
        ]
        pid = _begin_writing(place, extents)
        signal.sigtimedwait([signal.SIGUSR1], random.Random(generation).uniform(0.001, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert _is_killed(os.waitpid(pid, 0)[1])
        for extent in extents:
            driver.spoil(extent)
        driver.store.submit_reads(extents)
        for result in driver.results(SLOT_COUNT):
            outcomes.append(result.outcome)
            extent = extents[result.index]
            if result.outcome is Outcome.OK:
                assert driver.payloads(extent) == driver.expected(extent)
    assert Outcome.OK in outcomes
    driver.store.close()


def _begin_writing(place, extents: list[Extent]) -> int:
    """The id of a process that writes these extents over and over, and has begun."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = place.store()
            store.open()
            driver = Driver(store, LARGE, SLOT_COUNT)
            extents = [
                replace(e, buffer_address=driver.buffer.address + n * LARGE.page_bytes)
                for n, e in enumerate(extents)
            ]
            for extent in extents:
                driver.fill(extent)
            os.write(said, b"x")
            while True:
                store.submit_writes(extents)
                driver.results(len(extents))
        finally:
            os._exit(1)
    os.read(heard, 1)
    os.close(heard)
    os.close(said)
    return pid
