"""The emulation is strict: what the real library punishes later ends the program at once."""

import errno
import subprocess
import sys
import tempfile

import pytest

PROLOGUE = """
import ctypes, mmap, os, sys, threading
library = ctypes.CDLL(sys.argv[1])
mount = sys.argv[2]

class Iov(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("id", ctypes.c_char * 16),
                ("mount_point", ctypes.c_char * 256), ("size", ctypes.c_size_t),
                ("block_size", ctypes.c_size_t), ("numa", ctypes.c_int)]

class Ior(ctypes.Structure):
    _fields_ = [("iov", Iov), ("handle", ctypes.c_void_p), ("mount_point", ctypes.c_char * 256),
                ("for_read", ctypes.c_bool), ("io_depth", ctypes.c_int),
                ("priority", ctypes.c_int), ("timeout", ctypes.c_int), ("flags", ctypes.c_uint64)]

class Cqe(ctypes.Structure):
    _fields_ = [("index", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("result", ctypes.c_int64), ("userdata", ctypes.c_void_p)]

shared = sys.argv[3]
descriptor = os.open(shared, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(descriptor, 65536)
memory = mmap.mmap(descriptor, 65536)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
os.symlink(shared, f"{mount}/3fs-virt/iovs/61616161-6161-6161-6161-616161616161")
iov = Iov()
library.hf3fs_iovwrap(ctypes.byref(iov), ctypes.c_void_p(address), b"a" * 16, mount.encode(),
                      ctypes.c_size_t(65536), ctypes.c_size_t(0), -1)

def ring(for_read=True, flags=0, entries=2):
    made = Ior()
    assert library.hf3fs_iorcreate4(ctypes.byref(made), mount.encode(), entries, for_read, 0, 0, -1,
                                    ctypes.c_uint64(flags)) == 0
    return made

def prep(ring, is_read=True, place=0, length=4096, offset=0, file=None):
    return library.hf3fs_prep_io(
        ctypes.byref(ring), ctypes.byref(iov), is_read, ctypes.c_void_p(address + place),
        handle if file is None else file, ctypes.c_size_t(offset), ctypes.c_uint64(length), None)

def result(ring):
    done = Cqe()
    library.hf3fs_submit_ios(ctypes.byref(ring))
    assert library.hf3fs_wait_for_ios(ctypes.byref(ring), ctypes.byref(done), 1, 1, None) == 1
    return done.result

handle = os.open(f"{mount}/file", os.O_RDWR | os.O_CREAT)
os.ftruncate(handle, 10000)
assert library.hf3fs_reg_fd(handle, 0) <= 0
"""
EPILOGUE = '\nprint("end")\n'


def _run(emulation, program: str) -> subprocess.CompletedProcess:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        return _run_with(shared.name, emulation, program)


def _run_with(shared: str, emulation, program: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROLOGUE + program + EPILOGUE]
    return subprocess.run(
        [*command, str(emulation.path), str(emulation.mount), shared],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("prep(ring(), place=65536)", "outside of its memory"),
        ("prep(ring(), place=65000)", "outside of its memory"),
        (
            "r = ring()\nprep(r)\nt = threading.Thread(target=prep, args=(r,))\n"
            "t.start()\nt.join()",
            "two threads prepare",
        ),
        ("r = ring()\nlibrary.hf3fs_iordestroy(ctypes.byref(r))\nprep(r)", "was destroyed"),
        ("r = ring()\nprep(r)\nlibrary.hf3fs_iordestroy(ctypes.byref(r))", "not finished"),
        (
            "os.close(handle)\nother = os.open(f'{mount}/other', os.O_RDWR | os.O_CREAT)\n"
            "library.hf3fs_reg_fd(other, 0)",
            "closed and not deregistered",
        ),
        (
            "os.close(handle)\nother = os.open(f'{mount}/other', os.O_RDWR | os.O_CREAT)\n"
            "prep(ring())",
            "not deregistered",
        ),
        ("os.close(handle)\nlibrary.hf3fs_dereg_fd(handle)", "before it was deregistered"),
    ],
)
def test_misuse_aborts(emulation, program, words):
    done = _run(emulation, program)
    assert done.returncode < 0
    assert words in done.stderr


def test_errors_are_those_of_the_interface(emulation):
    done = _run(
        emulation,
        f"""
assert library.hf3fs_reg_fd(handle, 0) == {errno.EINVAL}, "registered twice"
assert library.hf3fs_reg_fd(os.open("/dev/null", os.O_RDWR), 0) == {errno.EBADF}
r, forbidding, w = ring(), ring(flags=2), ring(for_read=False)
assert prep(r, is_read=False) == -{errno.EINVAL}, "another direction"
assert prep(r, file=handle + 100) == -{errno.EBADF}
assert prep(r) >= 0 and prep(r) >= 0 and prep(r) == -{errno.EAGAIN}, "full"
assert result(r) == 4096 and memory[:4096] == bytes(4096), "a hole reads as zeros"
assert result(r) == 4096
assert prep(forbidding) >= 0 and result(forbidding) == -{errno.ENODATA}
memory[:4096] = b"x" * 4096
assert prep(w, is_read=False, offset=4096) >= 0 and result(w) == 4096
assert prep(w, is_read=False, offset=8192, place=4096) >= 0 and result(w) == 4096
memory[:4096] = bytes(4096)
assert prep(forbidding, offset=4096) >= 0 and result(forbidding) == 4096
assert memory[:4096] == b"x" * 4096
assert prep(r, offset=12000) >= 0 and result(r) == 288, "a short read at the end"
os.unlink(f"{{mount}}/3fs-virt/iovs/61616161-6161-6161-6161-616161616161")
assert prep(r) >= 0 and result(r) == -{errno.EACCES}, "no link"
""",
    )
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stderr
