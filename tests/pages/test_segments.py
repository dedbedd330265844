"""The folder of a store: what is found there is used only if it is whole and this store's own."""

import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.checksum import checksum_reference
from kvferry.errors import ConfigError, ExhaustedError, IncompatibleError
from kvferry.layout import PageGeometry
from kvferry.pages import files, segments
from kvferry.pages.base import Outcome, SegmentFacts, StoreFacts
from kvferry.pages.facts import Asked, default_segment_bytes
from kvferry.pages.segments import SegmentFiles
from kvferry.testing.clock import ManualClock
from tests.pages import golden

ASKED = Asked(capacity_bytes=8 << 20, alignment_bytes=4096, segment_bytes=1 << 20)
GEOMETRY = PageGeometry(slice_count=4, payload_bytes=5000, chunk_tokens=16)
NAMESPACE = bytes(range(32))
GIB = 1 << 30


def _files(root: Path, asked: Asked = ASKED, seed: int = 0) -> SegmentFiles:
    return SegmentFiles(root, asked, ManualClock(seed), checksum_reference)


@pytest.fixture
def store(tmp_path) -> SegmentFiles:
    store = _files(tmp_path)
    store.open()
    store.create(1, NAMESPACE, GEOMETRY)
    return store


def _age(path: Path) -> None:
    then = path.stat().st_mtime - 2 * files.TEMPORARY_AGE_S
    os.utime(path, (then, then))


def _names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# Formats.


def test_the_superblock_is_what_the_golden_file_says(tmp_path):
    _files(tmp_path).open()
    found = json.loads((tmp_path / "superblock.json").read_text())
    found["store_id"], found["created_wall_s"] = "0" * 32, 1.7e9
    assert found == golden.load("superblock.json")


def test_a_segment_header_is_what_the_golden_file_says():
    segment = SegmentFacts(0x01020304, NAMESPACE, GEOMETRY, 21)
    store = StoreFacts(bytes(range(100, 116)), 8 << 20, 4096, 1 << 20)
    block = segments.pack_segment_header(segment, store, checksum_reference)
    assert len(block) == 4096
    assert golden.to_rows(block) == golden.load("segment_header.json")


def test_a_later_superblock_is_refused_with_the_cure(tmp_path):
    _files(tmp_path).open()
    path = tmp_path / "superblock.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match=r"version 2.*upgrade kvferry"):
        _files(tmp_path).open()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 3}', b"\xff\x00"])
def test_a_damaged_superblock_is_refused_with_the_cure(tmp_path, content):
    (tmp_path / "superblock.json").write_bytes(content)
    with pytest.raises(ConfigError, match="damaged: empty the folder"):
        _files(tmp_path).open()


@pytest.mark.parametrize(
    "field",
    ['"store_id": "zz"', '"segment_bytes": 0', '"alignment_bytes": -4096', '"capacity_bytes": 0'],
)
def test_a_superblock_that_cannot_be_is_damaged(tmp_path, field):
    """It ended in a traceback, or in a division by zero."""
    _files(tmp_path).open()
    path = tmp_path / "superblock.json"
    name = field.split(":")[0]
    lines = [f" {field}," if name in line else line for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="damaged: empty the folder"):
        _files(tmp_path).open()


# Who creates a store, and with what.


def test_all_who_create_a_store_at_once_have_the_same(tmp_path):
    barrier = threading.Barrier(8)
    found = []

    def create(seed):
        store = _files(tmp_path, seed=seed)
        barrier.wait()
        found.append(store.open())

    threads = [threading.Thread(target=create, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert _names(tmp_path) == {"superblock.json"}


def test_nobody_else_may_read_the_files(tmp_path):
    root = tmp_path / "deep" / "store"
    store = _files(root)
    store.open()
    store.create(1, NAMESPACE, GEOMETRY)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (root, *root.rglob("*"))}
    assert modes == {
        "store": 0o700,
        "superblock.json": 0o600,
        "segments": 0o700,
        "00000001.seg": 0o600,
    }


@pytest.mark.parametrize(
    ("capacity_bytes", "page_bytes", "expected_bytes"),
    [
        (1 << 40, 0, 4 * GIB),
        (64 * GIB, 0, GIB),
        (4 * GIB, 0, GIB >> 2),
        (GIB, 0, 64 << 20),
        (64 << 20, 0, 4 << 20),
        (64 << 20, 6 << 20, (24 << 20) + 4096),
        (64 << 20, (6 << 20) + 1, (24 << 20) + 5 * 4096),
        (1000, 0, 8192),
    ],
)
def test_default_segment_size(capacity_bytes, page_bytes, expected_bytes):
    assert default_segment_bytes(capacity_bytes, 4096, page_bytes) == expected_bytes


def test_default_segment_size_is_a_multiple_of_the_alignment():
    for alignment_bytes in (4096, 1 << 16, 1 << 20):
        for capacity_bytes in range(10**8, 10**11, 10**10 - 7):
            assert default_segment_bytes(capacity_bytes, alignment_bytes, 0) % alignment_bytes == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capacity_bytes": 1 << 19}, "capacity_bytes 524288 must hold one segment"),
        ({"alignment_bytes": 5000}, "power of two"),
        ({"alignment_bytes": 512}, "at least 4096"),
        ({"segment_bytes": 4097}, "multiple of alignment_bytes"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        _files(tmp_path, replace(ASKED, **change)).open()
    assert _names(tmp_path) == set()


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"give user .* a folder that it can write"):
        _files(tmp_path / "file" / "store").open()


def test_a_folder_of_another_user_is_refused(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from kvferry.pages import files\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "with files.system_errors('use the store', root): root.mkdir()"
    )
    root = tmp_path / "store"
    command = [sys.executable, "-c", code, str(root)]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--clear-groups", *command]
    else:
        tmp_path.chmod(0o500)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "setpriv" in ended.stderr or "No module named" in ended.stderr:
        pytest.skip("cannot become another user here")
    assert "ConfigError" in ended.stderr and "Permission denied" in ended.stderr
    assert "a folder that it can write" in ended.stderr


# Segments.


@pytest.mark.parametrize("offset", [0, 20, 60, 100, 250, 4000])
def test_a_damaged_segment_is_no_segment_and_its_number_is_free(store, offset):
    with store.path(1).open("r+b") as file:
        file.seek(offset)
        file.write(b"\x5a")
    assert store.read(1) is Outcome.CORRUPT and store.all_facts() == []
    store.create(1, NAMESPACE, GEOMETRY)
    assert [facts.segment for facts in store.all_facts()] == [1]


def test_a_segment_of_another_store_or_number_is_left_alone(store, tmp_path):
    other = _files(tmp_path / "other", seed=5)
    other.open()
    other.create(2, NAMESPACE, GEOMETRY)
    content = other.path(2).read_bytes()
    store.path(2).write_bytes(content)
    store.path(3).write_bytes(store.path(1).read_bytes())
    assert [facts.segment for facts in store.all_facts()] == [1]
    for segment in (2, 3):
        with pytest.raises(IncompatibleError):
            store.create(segment, NAMESPACE, GEOMETRY)
        _age(store.path(segment))
    store.open()
    assert store.path(2).read_bytes() == content and store.path(3).exists()


def test_of_two_who_create_a_segment_at_once_one_wins(tmp_path, monkeypatch):
    both_looked = threading.Barrier(2)
    real_fallocate = os.posix_fallocate

    def fallocate(*args):
        both_looked.wait(10)
        real_fallocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    won, lost = [], []

    def create(seed):
        store = _files(tmp_path, seed=seed)
        store.open()
        try:
            store.create(1, bytes([seed]) * 32, GEOMETRY)
            won.append(bytes([seed]) * 32)
        except IncompatibleError:
            lost.append(seed)

    threads = [threading.Thread(target=create, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 1
    store = _files(tmp_path)
    store.open()
    assert [found.namespace for found in store.all_facts()] == won


def test_a_deleted_segment_gives_its_space_back_while_others_have_it_open(store):
    descriptor = os.open(store.path(1), os.O_RDONLY)
    assert os.fstat(descriptor).st_blocks > 0
    store.delete(1)
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_space_is_counted_in_blocks_and_once_for_each_file(store, tmp_path):
    before = store.used_bytes()
    assert before >= 1 << 20
    os.link(store.path(1), tmp_path / "segments/half.tmp")
    assert store.used_bytes() == before
    (tmp_path / "segments/sparse.tmp").touch()
    os.truncate(tmp_path / "segments/sparse.tmp", 1 << 30)
    assert store.used_bytes() == before


def test_what_was_left_half_made_is_removed_when_old(store, tmp_path):
    damaged, fresh = tmp_path / "segments/00000009.seg", tmp_path / "segments/0000000a.seg"
    old = [tmp_path / "superblock.json.0.tmp", tmp_path / "segments/00000002.seg.0.tmp", damaged]
    young = [tmp_path / "segments/00000003.seg.1.tmp", fresh]
    for path in (*old, *young):
        path.write_bytes(b"x" * 5000)
    for path in (*old, store.path(1), tmp_path / "superblock.json"):
        _age(path)
    store.open()
    assert _names(tmp_path) == {
        "superblock.json",
        "segments/00000001.seg",
        "segments/00000003.seg.1.tmp",
        "segments/0000000a.seg",
    }


def test_files_that_are_not_ours_are_neither_used_nor_touched(store, tmp_path):
    for name in ("1.seg", "zzzzzzzz.seg", "00000001.seg.bak", "readme"):
        path = tmp_path / "segments" / name
        path.write_text("")
        _age(path)
    store.open()
    assert [facts.segment for facts in store.all_facts()] == [1]
    assert len(_names(tmp_path)) == 6


def test_a_limit_on_file_size_leaves_nothing_behind(tmp_path):
    code = (
        "import resource, sys, pathlib\n"
        "from tests.pages.test_segments import *\n"
        "from tests.pages.test_segments import _files\n"
        "store = _files(pathlib.Path(sys.argv[1]))\n"
        "store.open()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
        "store.create(1, NAMESPACE, GEOMETRY)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ExhaustedError.__name__ in ended.stderr
    assert _names(tmp_path) == {"superblock.json"}


# Resize.


def test_resize_changes_the_capacity_and_nothing_else(store, tmp_path):
    before = store.open()
    assert segments.resize(tmp_path, 16 << 20, ManualClock()) == replace(
        before, capacity_bytes=16 << 20
    )
    assert _files(tmp_path, Asked()).open() == replace(before, capacity_bytes=16 << 20)
    with pytest.raises(ConfigError, match="8388608 here and 16777216"):
        store.open()


def test_resize_needs_a_store_and_room_for_a_segment(store, tmp_path):
    with pytest.raises(ConfigError, match="no store"):
        segments.resize(tmp_path / "segments", 16 << 20, ManualClock())
    with pytest.raises(ConfigError, match="less than one segment"):
        segments.resize(tmp_path, 1 << 19, ManualClock())
    assert store.open().capacity_bytes == 8 << 20
