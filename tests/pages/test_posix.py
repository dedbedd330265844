"""The posix page store conforms, with and without the page cache, and what only it can do wrong."""

import errno
import logging
import os
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.layout import Address
from kvferry.pages.base import Outcome
from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import GEOMETRY, HOME, NAMESPACE, PageStoreSuite
from kvferry.testing.staging import Driver, page_id

pytest.importorskip("kvferry._native")
from kvferry.testing.posix_place import PosixPlace

PAGE = page_id("a")


class TestDirect(PageStoreSuite):
    @pytest.fixture
    def place(self, tmp_path):
        return PosixPlace(tmp_path / "store", ManualClock())


class TestBuffered(PageStoreSuite):
    @pytest.fixture
    def place(self, tmp_path):
        return PosixPlace(tmp_path / "store", ManualClock(), direct_io="off")


def _driver(root: Path, segment_count: int = 1, page_count: int = 4, **options) -> Driver:
    store = PosixPlace(root, ManualClock(), **options).store()
    store.open()
    for segment in range(1, segment_count + 1):
        store.create_segment(segment, NAMESPACE, GEOMETRY)
    return Driver(store, GEOMETRY, page_count)


def _open_segments(root: Path) -> list[str]:
    """Segment files of a store that this process holds open, deleted ones included."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(str(root)):
            found.append(target)
    return found


@pytest.fixture
def no_direct_io(monkeypatch):
    """A file system that has no direct I/O."""
    real_open = os.open

    def without(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without)


def test_without_direct_io_it_says_so_once_and_works(tmp_path, no_direct_io, caplog):
    with caplog.at_level(logging.WARNING):
        driver = _driver(tmp_path)
        driver.write(PAGE, HOME)
        assert driver.read(PAGE, HOME).result.outcome is Outcome.OK
    assert [r.message for r in caplog.records if "direct I/O" in r.message] == [
        f"no direct I/O in {tmp_path}: pages go through the page cache"
    ]
    assert driver.store.direct_io is False
    driver.store.close()


def test_direct_io_that_was_asked_for_is_there_or_the_store_does_not_open(tmp_path, no_direct_io):
    with pytest.raises(ConfigError, match="set direct_io to auto"):
        _driver(tmp_path, direct_io="on")
    assert not list(tmp_path.rglob("*.tmp"))


def test_direct_io_is_used_where_it_can_be(tmp_path):
    driver = _driver(tmp_path, direct_io="auto")
    if not driver.store.direct_io:
        pytest.skip("the file system of the test folder has no direct I/O")
    driver.write(PAGE, HOME)
    (path,) = _open_segments(tmp_path)
    numbers = [n for n in os.listdir("/proc/self/fd") if _is_open_as(n, path)]
    flags = Path(f"/proc/self/fdinfo/{numbers[0]}").read_text().split("flags:")[1].split()[0]
    assert int(flags, 8) & os.O_DIRECT
    driver.store.close()


def _is_open_as(number: str, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") == path
    except FileNotFoundError:
        return False


def test_descriptors_are_bounded_and_all_closed(tmp_path):
    driver = _driver(tmp_path, segment_count=6, page_count=6, descriptor_max=2)
    for segment in range(1, 7):
        assert driver.write(PAGE, Address(segment, 0)).outcome is Outcome.OK
        assert len(_open_segments(tmp_path)) <= 2
    driver.store.submit_reads([driver.extent(PAGE, Address(n + 1, 0), None, n) for n in range(6)])
    assert [r.outcome for r in driver.results(6)] == [Outcome.OK] * 6
    assert len(_open_segments(tmp_path)) <= 2
    driver.store.close()
    assert _open_segments(tmp_path) == []


def test_a_segment_may_be_deleted_while_it_is_read_and_written(tmp_path):
    driver = _driver(tmp_path, page_count=16)
    pages = [page_id(str(n)) for n in range(16)]
    for _ in range(20):
        driver.store.create_segment(1, NAMESPACE, GEOMETRY)
        extents = [driver.extent(p, Address(1, n), None, n) for n, p in enumerate(pages)]
        for extent in extents:
            driver.fill(extent)
        driver.store.submit_writes(extents)
        driver.results(16)
        for extent in extents[:8]:
            driver.spoil(extent)
        reads = driver.store.submit_reads(extents[:8])
        driver.store.submit_writes(extents[8:])
        driver.store.delete_segment(1)
        for result in driver.results(16):
            if result.job == reads and result.outcome is Outcome.OK:
                extent = extents[result.index]
                assert driver.payloads(extent) == driver.expected(extent)
        assert _open_segments(tmp_path) == []
    driver.store.close()


def test_close_lets_go_of_the_files_of_what_was_in_flight(tmp_path):
    driver = _driver(tmp_path)
    driver.store.submit_reads([driver.extent(PAGE, HOME)])
    driver.store.close()
    assert _open_segments(tmp_path) == []


@pytest.mark.parametrize("call", ["open", "stat"])
def test_what_the_system_refuses_is_a_result_with_its_number(tmp_path, monkeypatch, call):
    driver = _driver(tmp_path)
    if call == "stat":
        driver.write(PAGE, HOME)
    real_call = getattr(os, call)

    def failing(path, *args, **kwargs):
        if str(path).endswith(".seg"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_call(path, *args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    result = driver.read(PAGE, HOME).result
    assert (result.outcome, result.errno) == (Outcome.IO_ERROR, errno.EIO)
    monkeypatch.undo()
    assert driver.write(PAGE, HOME).outcome is Outcome.OK
    driver.store.close()
    assert _open_segments(tmp_path) == []


def test_the_native_threads_agree_with_the_format(tmp_path):
    """Every header field that a reader compares, in the native reader."""
    place = PosixPlace(tmp_path, ManualClock())
    driver = _driver(tmp_path)
    driver.write(PAGE, HOME)
    stored = place.page(HOME)
    compared = [range(0, 8), range(8, 80), range(112, 128), range(152, 176)]
    for offset in (o for fields in compared for o in fields):
        block = bytearray(stored[:4096])
        block[offset] ^= 0x40
        block[248:256] = bytes(8)
        block[248:256] = place.digest(block).to_bytes(8, "little")
        place.replace_page(HOME, bytes(block) + stored[4096:])
        outcome = driver.read(PAGE, HOME).result.outcome
        is_damage = offset < 8 or offset >= 168
        assert outcome is (Outcome.CORRUPT if is_damage else Outcome.FOREIGN), offset
    driver.store.close()
