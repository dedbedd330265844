"""Several engines on one host share a catalog, and any of them may be killed at any instruction."""

import subprocess
import sys

import pytest

from kvferry.catalog.base import Commit, Space, Verdict
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.lmdb_environment import boot_id
from kvferry.catalog.snapshot import check_invariants
from kvferry.clock import SystemClock
from tests.catalog.crowd import kill, live_together
from tests.catalog.slot_worker import CAPACITY_BYTES, SEGMENT_BYTES, STORE

SPACE = Space(b"n" * 32, 8, 4096, slice_count=1, chunk_tokens=16, description="")
CLOCK = SystemClock()


def start(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_no_slot_has_two_owners_whoever_is_killed(tmp_path):
    live_together(tmp_path, f"lmdb://{tmp_path}/catalog", seed=1, kill_count=8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_no_slot_ever_has_two_owners(tmp_path, seed):
    live_together(tmp_path, f"lmdb://{tmp_path}/catalog", seed, kill_count=100)


OPEN = """
import sys
from pathlib import Path
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.lmdb_environment import boot_id
from kvferry.catalog.base import Space
from kvferry.clock import SystemClock
catalog = LmdbCatalog(Path(sys.argv[1]), SystemClock())
print(catalog.open(b"s" * 16, 1 << 22, 1 << 20), flush=True)
"""

HANG_IN_A_WRITE = (
    OPEN
    + """
def hang(tables):
    for key, _ in tables.free.scan():
        tables.free.delete(key)
    print("inside", flush=True)
    SystemClock().sleep(60)
catalog._opened().write(hang)
"""
)

HANG_IN_A_READ = (
    OPEN
    + """
def hang(tables):
    tables.meta.get(b"catalog")
    print("inside", flush=True)
    SystemClock().sleep(60)
catalog._opened().read(hang)
"""
)


@pytest.fixture
def catalog(tmp_path):
    catalog = LmdbCatalog(tmp_path, CLOCK)
    catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    catalog.attach(SPACE)
    catalog.grown(catalog.grow(SPACE.namespace))
    yield catalog
    catalog.close()


def test_a_process_killed_inside_a_transaction_blocks_nobody(tmp_path, catalog):
    other = start(HANG_IN_A_WRITE, tmp_path)
    assert other.stdout.readline() == "False\n"
    assert other.stdout.readline() == "inside\n"
    kill(other)
    slots = catalog.reserve(SPACE.namespace, 8, 60.0)
    assert len(slots) == 8, "half of a transaction was seen"
    commits = [Commit(bytes([i]) * 32, bytes(32), 0, s, 0, 1) for i, s in enumerate(slots)]
    assert catalog.commit(SPACE.namespace, commits) == [Verdict.PUBLISHED] * 8


def test_lookups_do_not_wait_for_a_writer(tmp_path, catalog):
    other = start(HANG_IN_A_WRITE, tmp_path)
    other.stdout.readline()
    assert other.stdout.readline() == "inside\n"
    assert catalog.lookup(SPACE.namespace, [b"x" * 32]) == [None]
    kill(other)


def test_the_reads_of_killed_processes_end(tmp_path, catalog):
    other = start(HANG_IN_A_READ, tmp_path)
    other.stdout.readline()
    assert other.stdout.readline() == "inside\n"
    assert f"{other.pid} " in catalog._environment._lmdb.readers()
    kill(other)
    catalog.sweep()
    assert f"{other.pid} " not in catalog._environment._lmdb.readers()


def test_what_a_killed_process_wrote_is_kept(tmp_path, catalog):
    catalog.close()
    code = OPEN + "catalog.attach(Space(b'm' * 32, 8, 4096, 1, 16, ''))\nprint('done', flush=True)"
    other = start(code + "\nSystemClock().sleep(60)", tmp_path)
    other.stdout.readline()
    assert other.stdout.readline() == "done\n"
    kill(other)
    assert not catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert catalog.snapshot().namespaces == {SPACE.namespace, b"m" * 32}


def test_a_catalog_that_another_process_has_open_is_not_called_clean(tmp_path, catalog):
    """Else a crash of the system would leave a torn file that looks whole."""
    other = start(OPEN + "SystemClock().sleep(60)", tmp_path)
    assert other.stdout.readline() == "False\n"
    catalog.close()
    assert (tmp_path / "in-use").read_bytes() == boot_id()
    kill(other)


def test_the_map_grows_under_the_feet_of_others(tmp_path):
    """A small map, so that both processes meet both sides of growing."""
    small = LmdbCatalog(tmp_path, CLOCK, map_bytes=1 << 16)
    small.open(STORE, 1 << 30, 1 << 20)
    code = OPEN.replace("SystemClock())", "SystemClock(), map_bytes=1 << 16)", 1).replace(
        "1 << 22", "1 << 30"
    )
    fill = """
first = int(sys.argv[2])
for number in range(first, first + 40):
    space = Space(bytes([number]) * 32, 200, 4096, 1, 16, "")
    catalog.attach(space)
    catalog.grown(catalog.grow(space.namespace))
    assert len(catalog.reserve(space.namespace, 100, 600.0)) == 100
print("done")
"""
    others = [start(code + fill, tmp_path, first) for first in (0, 150)]
    for process in others:
        assert process.communicate()[0] == "False\ndone\n"
    assert small._environment._lmdb.info()["map_size"] == 1 << 16, "it never had to follow"
    small.attach(SPACE)
    snapshot = small.snapshot()
    assert check_invariants(snapshot) == []
    assert len(snapshot.reserved) == 8000
    small.close()
