"""When the world fails: an outcome or a False in time, never a hang, never a wrong OK."""

import ctypes
import errno
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import _native
from kvferry.layout import HEADER_BYTES
from kvferry.pages.base import Outcome

from .buffers import Buffer
from .slices import (
    DEADLINE_S,
    SLICE_BYTES,
    collect,
    new_file,
    operation,
    outcome,
    payloads,
    read,
    write,
)


@pytest.fixture
def pool():
    pool = _native.IoPool(1, 1)
    yield pool
    assert pool.close(DEADLINE_S)


class HangingMemory:
    """Pages that whoever touches them waits for, until `release` (userfaultfd)."""

    def __init__(self, buffer: Buffer):
        libc = ctypes.CDLL(None, use_errno=True)
        number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
        user_mode_only = 1
        self._descriptor = libc.syscall(number, os.O_CLOEXEC | user_mode_only)
        if self._descriptor < 0:
            pytest.skip("no userfaultfd on this machine")
        api = (ctypes.c_uint64 * 3)(0xAA, 0, 0)
        missing_pages = 1
        area = (ctypes.c_uint64 * 4)(buffer.address, len(buffer.view), missing_pages, 0)
        assert libc.ioctl(self._descriptor, ctypes.c_ulong(0xC018AA3F), api) == 0
        assert libc.ioctl(self._descriptor, ctypes.c_ulong(0xC020AA00), area) == 0

    def release(self):
        os.close(self._descriptor)


def test_a_full_disk_is_no_space(pool):
    full = os.open("/dev/full", os.O_WRONLY)
    ((result, number, _),) = write(pool, operation(full, payloads()))
    assert (result, number) == (Outcome.NO_SPACE, errno.ENOSPC)
    os.close(full)


def test_a_write_that_is_cut_off_is_not_ok(pool, tmp_path):
    """The first call writes a part, the next one says why there is no more."""
    descriptor = os.open(tmp_path / "extent", os.O_RDWR | os.O_CREAT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    cut_bytes = SLICE_BYTES + HEADER_BYTES + 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (cut_bytes, limits[1]))
    try:
        ((result, number, _),) = write(pool, operation(descriptor, payloads()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (result, number) == (Outcome.IO_ERROR, errno.EFBIG)
    assert os.fstat(descriptor).st_size == cut_bytes
    assert outcome(pool, descriptor) is Outcome.SHORT
    os.close(descriptor)


def test_a_read_that_comes_in_parts_is_put_together(pool):
    """Kernel tables are handed out a few KiB at a time, as some network file systems do."""
    table = Path("/proc/kallsyms")
    if not table.exists():
        pytest.skip("no file here that is handed out in parts")
    descriptor, buffer = os.open(table, os.O_RDONLY), Buffer(SLICE_BYTES)
    assert len(os.pread(descriptor, SLICE_BYTES, 0)) < SLICE_BYTES
    read(pool, operation(descriptor, buffer))
    with table.open("rb") as file:
        assert buffer.view == file.read(SLICE_BYTES)
    os.close(descriptor)


def test_a_descriptor_of_the_wrong_kind_is_an_error_with_its_number(pool):
    write_only = os.open("/dev/null", os.O_WRONLY)
    results = read(pool, operation(write_only, Buffer(SLICE_BYTES)))
    results += read(pool, operation(-1, Buffer(SLICE_BYTES)))
    results += write(pool, operation(-1, payloads(1)))
    assert [result[:2] for result in results] == [(Outcome.IO_ERROR, errno.EBADF)] * 3
    os.close(write_only)


def test_direct_io_round_trip_and_ragged_end(pool, tmp_path):
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        descriptor = os.open(tmp_path / "extent", flags)
    except OSError:
        pytest.skip("no direct I/O in the folder for tests")
    assert write(pool, operation(descriptor, payloads()))[0][0] is Outcome.OK
    assert outcome(pool, descriptor) is Outcome.OK
    os.truncate(descriptor, 2 * SLICE_BYTES + 100)
    assert outcome(pool, descriptor) is Outcome.SHORT
    os.close(descriptor)


def test_wait_ends_without_a_result(pool):
    assert pool.wait(0.01) == []


def test_a_write_that_hangs_stops_neither_reads_nor_close():
    pool = _native.IoPool(1, 1)
    descriptor = new_file()
    write(pool, operation(descriptor, payloads()))
    buffer = Buffer(SLICE_BYTES)
    memory = HangingMemory(buffer)
    pool.submit_writes([operation(descriptor, buffer), operation(descriptor, payloads())], None)
    assert outcome(pool, descriptor) is Outcome.OK
    assert not pool.close(0.05)
    assert pool.poll() == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit_reads([operation(descriptor, payloads())], True)
    memory.release()
    assert pool.close(DEADLINE_S)
    assert len(collect(pool, 1)) == 1  # what hung came back; what had not begun was dropped
    os.close(descriptor)


def test_close_waits_for_what_was_submitted():
    pool = _native.IoPool(1, 1)
    descriptor = new_file()
    pool.submit_writes([operation(descriptor, payloads())] * 20, None)
    assert pool.close(DEADLINE_S)
    assert pool.close(0.0)
    assert [result for result, _, _ in collect(pool, 20)] == [Outcome.OK] * 20
    os.close(descriptor)


@pytest.mark.parametrize("ending", ["close", "forget", "exit"])
def test_a_process_with_a_hanging_operation_ends(ending):
    """An engine must be able to stop when its storage does not answer."""
    program = (
        "from tests.native.test_io_faults import (\n"
        "    Buffer, HangingMemory, SLICE_BYTES, _native, new_file, operation)\n"
        "pool, buffer = _native.IoPool(1, 1), Buffer(SLICE_BYTES)\n"
        "memory = HangingMemory(buffer)\n"
        "pool.submit_writes([operation(new_file(), buffer)], None)\n"
        "assert pool.wait(0.1) == []\n"
        + {"close": "assert not pool.close(0.1)", "forget": "del pool", "exit": ""}[ending]
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False)
    assert done.returncode == 0


def test_a_forked_child_is_refused_and_ends(pool):
    child = os.fork()
    if child == 0:
        try:
            pool.submit_reads([operation(0, payloads())], True)
        except RuntimeError:
            os._exit(7 if pool.close(DEADLINE_S) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("counts", [(0, 1), (1, 0)])
def test_a_pool_needs_threads(counts):
    with pytest.raises(ValueError, match="thread_count"):
        _native.IoPool(*counts)
