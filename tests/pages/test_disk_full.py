"""A full disk stops storing, nothing else: what is there stays readable, and room is used again."""

import errno
import os
import subprocess
from dataclasses import replace

import pytest

from kvferry.errors import ExhaustedError
from kvferry.layout import Address
from kvferry.pages.base import Outcome
from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import GEOMETRY, HOME, NAMESPACE
from kvferry.testing.places import ASKED
from kvferry.testing.staging import Driver, page_id

pytest.importorskip("kvferry._native")
from kvferry.testing.posix_place import PosixPlace
from tests.emulation import library
from tests.pages.usrbio_place import UsrbioPlace

PAGE = page_id("a")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "kvferry-test", str(tmp_path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def driver(small_disk):
    store = PosixPlace(small_disk, ManualClock()).store()
    store.open()
    store.create_segment(HOME.segment, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    assert driver.write(PAGE, HOME).outcome is Outcome.OK
    yield driver
    store.close()


def test_a_store_on_a_full_disk_opens_and_is_read(small_disk, driver):
    _fill(small_disk)
    again = PosixPlace(small_disk, ManualClock(1)).store()
    again.open()
    assert Driver(again, GEOMETRY).read(PAGE, HOME).result.outcome is Outcome.OK
    again.close()


def test_a_segment_that_does_not_fit_leaves_nothing_behind(small_disk, driver):
    store = driver.store
    store.create_segment(2, NAMESPACE, GEOMETRY)
    store.create_segment(3, NAMESPACE, GEOMETRY)
    before = store.used_bytes()
    with pytest.raises(ExhaustedError, match="No space left"):
        store.create_segment(4, NAMESPACE, GEOMETRY)
    assert store.used_bytes() == before
    assert [found.segment for found in store.segments()] == [1, 2, 3]
    assert not list(small_disk.rglob("*.tmp"))
    assert driver.read(PAGE, HOME).result.outcome is Outcome.OK
    store.delete_segment(2)
    store.create_segment(4, NAMESPACE, GEOMETRY)
    assert driver.write(PAGE, Address(4, 0)).outcome is Outcome.OK


def test_a_preallocated_segment_takes_pages_though_the_disk_is_full(small_disk, driver):
    _fill(small_disk)
    for slot in range(20):
        assert driver.write(PAGE, Address(1, slot)).outcome is Outcome.OK


def test_a_write_without_room_says_so(small_disk, driver):
    """A file system that cannot preallocate runs out in the middle of a segment."""
    path = small_disk / "segments/00000001.seg"
    length_bytes = path.stat().st_size
    os.truncate(path, 4096)
    os.truncate(path, length_bytes)
    _fill(small_disk)
    result = driver.write(PAGE, HOME)
    assert (result.outcome, result.errno) == (Outcome.NO_SPACE, errno.ENOSPC)
    assert driver.read(PAGE, HOME).result.outcome is not Outcome.OK
    os.unlink(small_disk / "filler")
    assert driver.write(PAGE, HOME).outcome is Outcome.OK
    assert driver.read(PAGE, HOME).result.outcome is Outcome.OK


def test_a_store_without_room_for_a_superblock_says_so(small_disk):
    _fill(small_disk)
    with pytest.raises(ExhaustedError, match="No space left"):
        PosixPlace(small_disk / "store", ManualClock()).store(
            replace(ASKED, capacity_bytes=2 << 20)
        ).open()
    assert not list(small_disk.rglob("*.tmp"))


@pytest.fixture
def driver_on_3fs(small_disk, hf3fs_library):
    emulation = library.Emulation(hf3fs_library, small_disk)
    place = UsrbioPlace(emulation)
    store = place.store()
    store.open()
    store.create_segment(HOME.segment, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    assert driver.write(PAGE, HOME).outcome is Outcome.OK
    driver.place = place
    yield driver
    store.close()
    assert emulation.left_over() == []


def test_3fs_that_is_full_opens_and_is_read_and_says_so_when_written(small_disk, driver_on_3fs):
    """It has no preallocation, so a segment runs out in the middle."""
    driver, other = driver_on_3fs, Address(HOME.segment, 9)
    driver.store.create_segment(2, NAMESPACE, GEOMETRY)
    _fill(small_disk)
    again = driver.place.store()
    again.open()
    assert Driver(again, GEOMETRY).read(PAGE, HOME).result.outcome is Outcome.OK
    again.close()
    result = driver.write(PAGE, other)
    assert (result.outcome, result.errno) == (Outcome.NO_SPACE, errno.ENOSPC)
    assert driver.read(PAGE, other).result.outcome is not Outcome.OK
    assert driver.read(PAGE, HOME).result.outcome is Outcome.OK
    assert driver.write(PAGE, HOME).outcome is Outcome.OK, "where there are blocks already"
    os.unlink(small_disk / "filler")
    assert driver.write(PAGE, other).outcome is Outcome.OK
    assert driver.read(PAGE, other).result.outcome is Outcome.OK


def _fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
