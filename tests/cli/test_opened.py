"""Looking at a store must neither make one nor disturb the engines that use it."""

import errno
import os
from pathlib import Path

import pytest

pytest.importorskip("kvferry._native", reason="posix pages need the native extension")

from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.cli import check, status
from kvferry.cli.finding import State
from kvferry.cli.opened import existing_root, open_store
from kvferry.cli.options import store_config
from kvferry.cli.resize import resize
from kvferry.cli.store_checks import check_store
from kvferry.clock import SystemClock
from kvferry.config import split_url
from kvferry.errors import ConfigError, IncompatibleError, UnavailableError
from kvferry.pages.facts import Asked
from kvferry.pages.open import open_roots, open_url
from kvferry.pages.owner import StoreOwnership
from kvferry.pages.segments import read_superblock
from kvferry.testing.clock import ManualClock

CAPACITY_BYTES = 16 << 20


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A store that was made and closed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "kv"
    open_url(f"posix://{folder}", SystemClock(), Asked(capacity_bytes=CAPACITY_BYTES)).close()
    return folder


@pytest.fixture
def catalog(root):
    """Its catalog, as an engine has it open."""
    facts = read_superblock(root).facts()
    url = store_config(str(root)).catalog_url(facts.store_id)
    opened = LmdbCatalog(Path(split_url(url).path), SystemClock())
    opened.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
    yield opened
    opened.close()


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(UnavailableError, match="no store"), open_store(store_config(str(tmp_path))):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def roots(root, tmp_path):
    """The same store, with a second root."""
    names = [str(root), str(tmp_path / "more")]
    urls = [f"posix://{name}" for name in names]
    open_roots(urls, SystemClock(), Asked(capacity_bytes=CAPACITY_BYTES)).close()
    return names


def test_a_root_that_is_not_named_is_missed(roots):
    """`check --fix` would drop all pages that lie there."""
    with (
        pytest.raises(ConfigError, match=f"name it as {roots[0]},{roots[1]}"),
        open_store(store_config(roots[0])),
    ):
        pass


def test_looking_makes_no_root(roots, tmp_path):
    with open_store(store_config(",".join([*roots, str(tmp_path / "typo")]))) as store:
        assert store.pages.out_count() == 1
    assert not (tmp_path / "typo").exists()
    with open_store(store_config(",".join(roots))) as store:
        assert store.pages.out_count() == 0


def test_memory_is_refused():
    with pytest.raises(ConfigError), open_store(store_config("memory:")):
        pass


def test_no_catalog_is_made(root, tmp_path):
    with open_store(store_config(str(root))) as store:
        assert status.examine(store).catalog is None
        assert check.examine(store, fix=True).is_clean
    assert not (tmp_path / "state").exists()


def test_a_catalog_that_was_named_must_be_there(root, tmp_path):
    """A misspelt name must not look like a store that nobody has used."""
    config = store_config(str(root), f"lmdb://{tmp_path}/nothing")
    with pytest.raises(UnavailableError, match="no catalog"), open_store(config):
        pass


def test_a_catalog_in_use_is_shared(root, catalog):
    catalog_id = catalog.catalog_id
    with open_store(store_config(str(root))) as store:
        assert store.catalog.catalog_id == catalog_id
        assert status.examine(store).catalog.pages == 0
        assert check.examine(store, fix=False).has_catalog
    assert catalog.stats().capacity_bytes == CAPACITY_BYTES


def test_the_catalog_of_another_store_is_refused_and_stays_whole(root, catalog, tmp_path):
    """Looking at a store with a wrong --catalog must not empty the catalog of a good one."""
    catalog_id, url = catalog.catalog_id, f"lmdb://{catalog._folder}"
    catalog.close()
    other = tmp_path / "other"
    open_url(f"posix://{other}", SystemClock(), Asked(capacity_bytes=CAPACITY_BYTES)).close()
    with (
        pytest.raises(ConfigError, match="another store"),
        open_store(store_config(str(other), url)),
    ):
        pass
    facts = read_superblock(root).facts()
    assert not catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
    assert catalog.catalog_id == catalog_id


def test_resize_changes_the_store(root):
    resize(str(root), "32MiB")
    assert read_superblock(root).capacity_bytes == 32 << 20


def test_a_capacity_that_the_disk_has_not_is_pointed_out(root, capsys):
    resize(str(root), "32MiB")
    assert "free space" not in capsys.readouterr().err
    resize(str(root), "900PiB")
    assert "free space" in capsys.readouterr().err


def test_a_store_that_cannot_be_opened_comes_with_advice(tmp_path, monkeypatch):
    with pytest.raises(UnavailableError, match="an engine makes it"):
        existing_root(store_config(str(tmp_path)))

    def refuse(root):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("kvferry.cli.opened.read_superblock", refuse)
    with pytest.raises(UnavailableError, match="give user"):
        existing_root(store_config(str(tmp_path)))


class Meanwhile(ManualClock):
    """While the command sleeps, somebody else works."""

    work = staticmethod(lambda: None)

    def sleep(self, duration_s):
        super().sleep(duration_s)
        self.work()


@pytest.fixture
def clock(monkeypatch):
    clock = Meanwhile()
    monkeypatch.setattr("kvferry.cli.resize.SystemClock", lambda: clock)
    return clock


def test_resize_is_refused_while_an_engine_uses_the_store(root, clock):
    owner = StoreOwnership(root, "ab" * 16, clock)
    owner.acquire(1.0)
    clock.work = owner.beat
    with pytest.raises(IncompatibleError):
        resize(str(root), "32MiB")
    assert read_superblock(root).capacity_bytes == CAPACITY_BYTES
    owner.release()
    resize(str(root), "32MiB")
    assert read_superblock(root).capacity_bytes == 32 << 20


def test_resize_is_not_held_up_by_an_engine_that_was_killed(root, clock):
    StoreOwnership(root, "ab" * 16, clock).acquire(1.0)
    resize(str(root), "32MiB")
    assert read_superblock(root).capacity_bytes == 32 << 20


def test_resize_can_be_forced(root, clock):
    owner = StoreOwnership(root, "ab" * 16, clock)
    owner.acquire(1.0)
    clock.work = owner.beat
    resize(str(root), "32MiB", force=True)
    assert read_superblock(root).capacity_bytes == 32 << 20


def test_doctor_opens_what_is_there(root, catalog):
    found = {finding.check: finding for finding in check_store(store_config(str(root)))}
    assert found["opens"].state is State.PASSED
    assert "0 pages" in found["opens"].detail


def test_doctor_says_why_a_catalog_cannot_be_opened(root, catalog):
    config = store_config(str(root))
    superblock = read_superblock(root)
    catalog.close()
    folder = Path(split_url(config.catalog_url(bytes.fromhex(superblock.store_id))).path)
    other = LmdbCatalog(folder, SystemClock())
    other.open(b"another store...", CAPACITY_BYTES, superblock.segment_bytes)
    found = {finding.check: finding for finding in check_store(config)}
    other.close()
    assert found["opens"].state is State.FAILED
    assert "another store" in found["opens"].detail
