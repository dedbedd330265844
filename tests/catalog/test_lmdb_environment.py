"""A catalog that may be torn is never opened; one that is whole is never thrown away."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from kvferry.catalog import lmdb_environment
from kvferry.catalog.base import Space
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, UnavailableError
from kvferry.testing.clock import ManualClock

STORE = b"s" * 16
SEGMENT_BYTES = 1 << 20
CAPACITY_BYTES = 4 * SEGMENT_BYTES
SPACE = Space(b"n" * 32, 8, 4096, slice_count=1, chunk_tokens=16, description="")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "catalog"


@pytest.fixture
def make(folder):
    """Opens catalogs in the folder; closes them at the end."""
    opened = []

    def open_one(store=STORE, clock=None):
        catalog = LmdbCatalog(folder, clock or ManualClock())
        opened.append(catalog)
        catalog.is_new = catalog.open(store, CAPACITY_BYTES, SEGMENT_BYTES)
        return catalog

    yield open_one
    for catalog in opened:
        catalog.close()


@pytest.fixture
def filled(make):
    """A catalog with one namespace, closed."""
    catalog = make()
    assert catalog.is_new
    catalog.attach(SPACE)
    catalog.grown(catalog.grow(SPACE.namespace))
    catalog.close()
    return catalog


@pytest.fixture
def reboot(tmp_path, monkeypatch):
    def run():
        path = tmp_path / "boot_id"
        path.write_text("00000000-0000-0000-0000-0000000000ff\n")
        monkeypatch.setattr(lmdb_environment, "BOOT_ID", path)

    return run


def is_whole(catalog):
    return catalog.snapshot().namespaces == {SPACE.namespace}


# Trust.


def test_after_a_clean_end_the_catalog_outlives_a_reboot(make, filled, reboot):
    reboot()
    catalog = make()
    assert not catalog.is_new
    assert is_whole(catalog)


def test_time_goes_on_where_a_reboot_stopped_it(make, reboot):
    clock = ManualClock(start_s=50_000.0)
    catalog = make(clock=clock)
    catalog.attach(SPACE)
    catalog.grown(catalog.grow(SPACE.namespace))
    catalog.reserve(SPACE.namespace, 1, lease_s=100.0)
    catalog.close()
    reboot()
    clock = ManualClock(start_s=3.0)
    catalog = make(clock=clock)
    clock.advance(99.0)
    assert catalog.sweep().expired_count == 0
    clock.advance(1.0)
    assert catalog.sweep().expired_count == 1


def test_time_waits_for_no_host_whose_clock_fell_back(make):
    catalog = make(clock=ManualClock(start_s=50_000.0))
    catalog.attach(SPACE)
    catalog.grown(catalog.grow(SPACE.namespace))
    catalog.reserve(SPACE.namespace, 1, lease_s=100.0)
    catalog.close()
    clock = ManualClock(start_s=3.0)
    catalog = make(clock=clock)
    clock.advance(100.0)
    assert catalog.sweep().expired_count == 1


def test_after_a_crash_of_the_system_the_catalog_starts_empty(make, folder, filled, reboot):
    (folder / "in-use").write_bytes(lmdb_environment.boot_id())  # as if it were still open
    reboot()
    catalog = make(clock=ManualClock(seed=1))
    assert catalog.is_new
    assert catalog.catalog_id != filled.catalog_id
    assert catalog.snapshot().namespaces == set()
    assert (folder / "set-aside.mdb").exists()


def test_only_the_last_to_leave_calls_it_clean(make, folder, filled):
    first, second = make(), make()
    first.close()
    assert (folder / "in-use").read_bytes() == lmdb_environment.boot_id()
    second.close()
    assert (folder / "in-use").read_bytes() == b""


def test_who_opens_while_the_last_one_leaves_is_not_taken_for_gone(
    make, folder, filled, monkeypatch
):
    """A lock that is asked to become exclusive is let go of first: who leaves in that moment finds
    nobody. What the other one writes is not flushed, so a mark must say that it is in use."""
    program = (
        "import sys, pathlib; from kvferry.catalog.lmdb import LmdbCatalog\n"
        "from kvferry.clock import SystemClock\n"
        "catalog = LmdbCatalog(pathlib.Path(sys.argv[1]), SystemClock())\n"
        f"catalog.open({STORE!r}, {CAPACITY_BYTES}, {SEGMENT_BYTES})\n"
        "print('open', flush=True); sys.stdin.read(); catalog.close()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "open\n"
    wait_for_lock = lmdb_environment.Environment._wait_for_lock

    def wait_until_the_other_has_left(environment):
        fcntl.flock(environment._descriptor, fcntl.LOCK_UN)
        other.communicate()
        wait_for_lock(environment)

    monkeypatch.setattr(
        lmdb_environment.Environment, "_wait_for_lock", wait_until_the_other_has_left
    )
    make()
    assert (folder / "in-use").read_bytes() == lmdb_environment.boot_id()


@pytest.mark.parametrize("garbage", [b"", b"x", b"garbage" * 10_000])
def test_garbage_is_set_aside(make, folder, filled, garbage):
    (folder / "data.mdb").write_bytes(garbage)
    assert make().is_new


def test_records_of_another_version_are_dropped(make, folder, filled):
    catalog = make()
    meta = catalog._environment.read(lambda tables: tables.meta.get(b"catalog"))
    other = b"\0\0\0\1" + meta[4:]
    catalog._environment.write(lambda tables: tables.meta.put(b"catalog", other))
    catalog.close()
    assert make().is_new


SURVIVE = """
import sys
from pathlib import Path
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.clock import SystemClock
from kvferry.errors import UnavailableError
damage = Path(sys.argv[2])
def spoil():
    data = Path(sys.argv[1]) / "data.mdb"
    size = data.stat().st_size
    if damage.name in ("cut", "cut later", "emptied later"):
        with open(data, "r+b") as file:
            file.truncate(0 if damage.name == "emptied later" else 8192)
    if damage.name in ("zero", "later"):
        with open(data, "r+b") as file:
            file.seek(8192)
            file.write(bytes(size - 8192))
def use():
    catalog = LmdbCatalog(Path(sys.argv[1]), SystemClock())
    try:
        is_new = catalog.open(b"s" * 16, 1 << 22, 1 << 20)
        if "later" in damage.name and not is_new:
            spoil()
        catalog.snapshot()
        return "new" if is_new else "known"
    except UnavailableError:
        return "unavailable"
    finally:
        catalog.close()
if "later" not in damage.name:
    spoil()
print(use(), use())
"""


@pytest.mark.parametrize("damage", ["cut", "zero", "later", "cut later", "emptied later"])
def test_damage_costs_the_catalog_and_not_the_engine(folder, filled, damage):
    """At the latest the second to come starts with an empty catalog; no process dies of it."""
    done = subprocess.run(
        [sys.executable, "-c", SURVIVE, folder, damage], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("new known\n", "unavailable new\n")


def test_damage_met_in_the_middle_is_remembered(make, filled):
    """Opening does not meet it: without the mark each start would fail like this one."""

    def meet_damage(tables):
        raise lmdb.CorruptedError("as LMDB would")

    catalog = make()
    with pytest.raises(UnavailableError):
        catalog._environment.read(meet_damage)
    catalog.close()
    assert make(clock=ManualClock(seed=1)).is_new


# Sharing.


def test_two_halves_of_one_process_share_it(make, filled):
    first, second = make(), make()
    first.attach(Space(b"m" * 32, 8, 4096, 1, 16, ""))
    assert second.snapshot().namespaces == {SPACE.namespace, b"m" * 32}
    first.close()
    assert second.lookup(SPACE.namespace, [b"x" * 32]) == [None]


def test_a_folder_in_use_for_another_store_is_refused(make, filled):
    first = make()
    with pytest.raises(ConfigError, match="of another store"):
        make(store=b"t" * 16)
    assert is_whole(first)
    first.close()
    assert make(store=b"t" * 16).is_new


def test_a_folder_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    catalog = LmdbCatalog(tmp_path / "file" / "catalog", ManualClock())
    with pytest.raises(ConfigError, match="local disk") as caught:
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert caught.value.context["folder"] == str(tmp_path / "file" / "catalog")


def test_nobody_else_on_the_host_can_read_it(filled, folder):
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_process_that_stops_while_opening_makes_others_wait_only_so_long(make, folder):
    folder.mkdir(mode=0o700)
    (folder / "in-use").touch()
    code = (
        "import fcntl, os, sys, signal\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "signal.pause()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, folder / "in-use"], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(UnavailableError, match="does not finish"):
        make()
    assert not (folder / "data.mdb").exists(), "it went in without the lock"
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert make().is_new


def test_a_call_that_hangs_does_not_hang_close(make, filled):
    catalog = make(clock=SystemClock())
    inside, release = threading.Event(), threading.Event()

    def hang(tables):
        inside.set()
        release.wait(30)

    thread = threading.Thread(target=lambda: catalog._environment.read(hang))
    environment = catalog._environment
    thread.start()
    assert inside.wait(5)
    catalog.close()
    assert not release.is_set()
    release.set()
    thread.join(5)
    assert not thread.is_alive()
    environment.close()


def test_a_verb_that_fails_changes_nothing(make, filled):
    catalog = make()
    before = catalog.snapshot()

    def fail(tables):
        tables.spaces.put(b"z" * 32, b"z")
        raise ValueError("our own")

    with pytest.raises(ValueError, match="our own"):
        catalog._environment.write(fail)
    assert catalog.snapshot() == before


def test_a_forked_process_does_not_close_its_parents_catalog(make, filled):
    catalog = make()
    pid = os.fork()
    if pid == 0:
        catalog.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert is_whole(catalog)
    assert Path(catalog._folder, "in-use").read_bytes() == lmdb_environment.boot_id()


def forked(work) -> str:
    """What `work` returns, or the name of the error that it raises, in a forked process."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    "verb",
    [
        lambda catalog: catalog.snapshot(),
        lambda catalog: catalog.attach(Space(b"m" * 32, 8, 4096, 1, 16, "")),
        lambda catalog: catalog._environment.clean_readers(),
        lambda catalog: catalog._environment.is_shared(),
    ],
    ids=["reads", "writes", "cleans", "locks"],
)
def test_a_forked_process_does_not_use_its_parents_catalog(make, filled, verb):
    """LMDB's locks and readers belong to the process that opened it: two would write at once."""
    catalog = make()
    assert forked(lambda: verb(catalog)) == "ClosedError"
    assert is_whole(catalog)


def test_a_forked_process_does_not_keep_the_catalog_of_a_parent_that_left(make, filled, folder):
    """Nobody would ever be the first again: what was torn is found by who gets the lock alone."""
    catalog = make()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    catalog.close()
    with (folder / "in-use").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(writing)
    os.waitpid(child, 0)
