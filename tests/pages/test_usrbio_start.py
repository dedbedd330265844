"""usrbio: starts, or says what is missing and what to do; it never becomes another backend."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvferry._native")
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, UnavailableError
from kvferry.pages import hf3fs, mounts, shared_memory, usrbio
from kvferry.pages.open import open_url
from kvferry.testing.clock import ManualClock
from kvferry.testing.places import ASKED

from .usrbio_place import OPTIONS, UsrbioPlace


def _open(folder: Path, library: Path):
    url = f"usrbio://{folder}"
    return open_url(url, SystemClock(), ASKED, usrbio_library=str(library), **OPTIONS)


def test_a_url_is_enough(emulation):
    store = _open(emulation.mount / "a/b", emulation.path)
    assert isinstance(store, usrbio.UsrbioPages)
    assert (emulation.mount / "a/b/superblock.json").exists()
    store.close()


def test_a_folder_that_is_not_on_3fs(emulation, tmp_path):
    with pytest.raises(ConfigError, match=r"not on a mounted 3FS.*mount it.*posix://"):
        _open(tmp_path / "elsewhere/kv", emulation.path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_library_that_is_not_there(emulation, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.so.*install.*usrbio_library"):
        _open(emulation.mount / "kv", tmp_path / "nowhere.so")


def test_a_library_of_another_kind(emulation):
    with pytest.raises(ConfigError, match="it has no function hf3fs_extract_mount_point"):
        _open(emulation.mount / "kv", Path("libc.so.6"))


def test_all_usual_places_are_named(monkeypatch):
    monkeypatch.setattr(hf3fs, "PLACES", ("/nowhere/a.so", "/nowhere/b.so"))
    with pytest.raises(ConfigError, match=r"/nowhere/a\.so.*/nowhere/b\.so"):
        hf3fs.load_library(None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"daemon_uid": 4711}, rf"Permission denied.*run as user {os.geteuid()}"),
        ({"blind": 1}, r"Permission denied.*same /dev/shm"),
        ({"refuse_rings": errno.EMFILE}, r"Too many open files.*iov_limit"),
        ({"refuse_files": errno.EBADF}, r"Bad file descriptor.*on the mount itself"),
    ],
)
def test_a_daemon_that_refuses(emulation, settings, words):
    emulation.configure(**settings)
    with pytest.raises(ConfigError, match=words):
        _open(emulation.mount / "kv", emulation.path)
    assert emulation.left_over() == []


def test_a_daemon_that_does_not_answer(emulation, monkeypatch):
    monkeypatch.setattr(usrbio, "_TRIAL_S", 0.1)
    monkeypatch.setattr(usrbio, "_TRIAL_CLOSE_S", 0.1)
    emulation.configure(lost=1)
    with pytest.raises(UnavailableError, match=r"has not answered.*hf3fs_fuse_main"):
        _open(emulation.mount / "kv", emulation.path)
    assert emulation.left_over() == []


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("find_mount", errno.ENOTCONN, "not connected.*mount it again"),
        ("sweep", errno.ENOTCONN, "not connected.*mount it again"),
        ("keep_from_children", errno.EMFILE, "Too many open files.*ulimit -n"),
    ],
)
def test_a_start_that_the_system_stops_says_what_to_do(emulation, monkeypatch, name, number, words):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(usrbio, name, refuse)
    with pytest.raises(UnavailableError, match=words):
        _open(emulation.mount / "kv", emulation.path)
    assert emulation.left_over() == []


def test_memory_in_the_shm_of_another_container_is_not_swept(emulation):
    """Else one engine that is started wrongly takes the memory of all others on the mount."""
    link = emulation.mount / "3fs-virt/iovs/11111111-1111-1111-1111-111111111111"
    link.symlink_to("/dev/shm/kvferry-7-0123456789abcdef")
    _open(emulation.mount / "kv", emulation.path).close()
    assert emulation.links() == [link]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EINVAL, "share the host's /dev/shm"),
        (errno.EACCES, "run this as the user that the daemon runs as"),
        (errno.EMFILE, "iov_limit"),
        (errno.ENOTCONN, "start hf3fs_fuse_main"),
    ],
)
def test_a_daemon_that_cannot_map_staging(emulation, monkeypatch, number, words):
    """The real daemon maps it when the link is made, and says no there."""

    def refusing(target, link):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refusing)
    with pytest.raises(ConfigError, match=words):
        _open(emulation.mount / "kv", emulation.path)
    assert emulation.left_over() == []


def test_no_file_left_for_shared_memory(emulation, monkeypatch):
    store = UsrbioPlace(emulation).store()
    store.open()

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=r"Too many open files.*ulimit -n"):
        store.allocate(1 << 20)
    store.close()
    assert emulation.left_over() == []


def test_too_little_shared_memory(emulation):
    store = UsrbioPlace(emulation).store()
    store.open()
    with pytest.raises(ConfigError, match=r"MiB free.*--shm-size.*staging_bytes"):
        store.allocate(1 << 45)
    store.close()
    assert emulation.left_over() == []


@pytest.mark.parametrize(
    ("soft", "hard", "words"),
    [
        (100, 1 << 20, r"limit of open files is 100, and 768 are needed.*ulimit -n 65536"),
        (1024, resource.RLIM_INFINITY, r"is unlimited.*ulimit -Hn 1048576"),
        (1024, 1 << 30, r"is 1073741824.*nofile=65536:1048576"),
    ],
)
def test_limits_of_open_files(soft, hard, words):
    with pytest.raises(ConfigError, match=words):
        hf3fs.check_file_limits(soft, hard, 768)
    hf3fs.check_file_limits(1024, 1 << 20, 768)


def test_posix_on_3fs_says_once_that_usrbio_is_faster(tmp_path, monkeypatch, caplog):
    kinds = [mounts.Mount(Path("/"), "ext4"), mounts.Mount(tmp_path.resolve(), "fuse.hf3fs")]
    monkeypatch.setattr(mounts, "current_mounts", lambda: kinds)
    store = open_url(f"posix://{tmp_path}/kv", ManualClock(), ASKED)
    store.open()
    said = [record.message for record in caplog.records if "usrbio" in record.message]
    assert said == [f"{tmp_path}/kv is on 3FS: usrbio:// is faster there than posix://"]
    store.close()


PROGRAM = """
import os, sys
from pathlib import Path
from kvferry.testing.places import ASKED
from kvferry.clock import SystemClock
from kvferry.pages.usrbio import UsrbioPages
store = UsrbioPages(Path(sys.argv[1]), SystemClock(), ASKED, library=sys.argv[2],
                    read_thread_count=1, write_thread_count=1)
store.open()
store.allocate(1 << 20)
print("open", flush=True)
sys.stdin.read()
"""


WITHOUT_THREADS = """
import ctypes, os, resource, signal, sys
from pathlib import Path
from kvferry.clock import SystemClock
from kvferry.errors import UnavailableError
from kvferry.pages.usrbio import UsrbioPages
from kvferry.testing.places import ASKED
folder, library, stack_bytes = sys.argv[1:]
store = UsrbioPages(Path(folder), SystemClock(), ASKED, library=library,
                    read_thread_count=2, write_thread_count=2)
used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
limit_bytes = used_bytes + int(5.5 * int(stack_bytes))  # four daemons, one thread
resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, -1))
try:
    store.open()
except UnavailableError as error:
    print(error.message)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "signals stay blocked"
assert ctypes.CDLL(library).hf3fs_emulation_count(b"rings") == 0
"""


def test_a_process_without_further_threads_keeps_its_signals_and_no_ring(emulation):
    """Else an engine that did not start cannot be told to end."""
    stack_bytes = 1 << 31
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS, str(emulation.mount / "kv"), str(emulation.path),
         str(stack_bytes)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard)),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "too few threads for I/O" in done.stdout


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_what_killed_processes_leave_is_swept_by_the_next(emulation, count):
    folder = emulation.mount / "kv"
    command = [sys.executable, "-c", PROGRAM, str(folder), str(emulation.path)]
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert living.stdout.readline() == b"open\n"
    own = set(emulation.links())
    for _ in range(count):
        killed = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert killed.stdout.readline() == b"open\n"
        assert len(emulation.links()) == 2, "the one before was swept, the living one was not"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    left_over = list(shared_memory.SHARED_MEMORY.glob(f"kvferry-{killed.pid}-*"))
    assert len(left_over) == 1
    _open(folder, emulation.path).close()
    assert set(emulation.links()) == own
    assert not left_over[0].exists()
    assert len(list(shared_memory.SHARED_MEMORY.glob(f"kvferry-{living.pid}-*"))) == 1
    living.communicate()
