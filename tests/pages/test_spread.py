"""A store over several mounts must conform like one, and lose only what is on one that fails."""

import shutil

import pytest

from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, ExhaustedError, UnavailableError
from kvferry.layout import Address
from kvferry.pages import memory, spread
from kvferry.pages.base import Outcome
from kvferry.pages.facts import Asked
from kvferry.pages.open import open_roots
from kvferry.pages.spread import SpreadPages
from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import GEOMETRY, NAMESPACE, PageStoreSuite
from kvferry.testing.places import ASKED, MemoryPlace
from kvferry.testing.staging import Driver, page_id

ROOT_COUNT = 3
GONE = ("open", "create_segment", "delete_segment", "has_segment", "segments", "used_bytes")


class SpreadPlace:
    """Roots in memory. A page lies on one of them. `roots`: those of the last store, home first."""

    digest = staticmethod(memory.digest)

    def __init__(self, rooms=(None,) * ROOT_COUNT):
        self.clock = ManualClock()
        self.places = [MemoryPlace(self.clock, memory.Medium(room)) for room in rooms]

    def store(self, asked: Asked = ASKED) -> SpreadPages:
        self.roots = [BrokenRoot(place.store(asked)) for place in self.places[:1]]

        def others(facts):
            further = Asked(
                facts.capacity_bytes,
                facts.alignment_bytes,
                facts.segment_bytes,
                store_id=facts.store_id,
            )
            self.roots += [BrokenRoot(place.store(further)) for place in self.places[1:]]
            return [(f"root {index}", root) for index, root in enumerate(self.roots) if index]

        return SpreadPages(("home", self.roots[0]), others, self.clock)

    def page(self, address: Address) -> bytes:
        return self._place(address).page(address)

    def replace_page(self, address: Address, content: bytes) -> None:
        self._place(address).replace_page(address, content)

    def holders(self, segment: int) -> list[int]:
        found = enumerate(place.medium.segments for place in self.places)
        return [index for index, segments in found if segment in segments]

    def _place(self, address: Address) -> MemoryPlace:
        return self.places[self.holders(address.segment)[0]]


class BrokenRoot:
    """A root that can be told to fail. `is_broken`: every operation is an I/O error. `is_silent`:
    no result comes back. `is_gone`: it cannot even be opened or asked."""

    def __init__(self, store):
        self._store = store
        self.is_broken = self.is_silent = self.is_gone = False

    def __getattr__(self, name):
        if self.is_gone and name in GONE:
            raise UnavailableError("pages.io", "this root is gone")
        return getattr(self._store, name)

    def poll(self):
        return [] if self.is_silent else [self._seen(result) for result in self._store.poll()]

    def wait(self, timeout_s):
        return self.poll()

    def _seen(self, result):
        if not self.is_broken:
            return result
        return type(result)(result.job, result.index, Outcome.IO_ERROR, 5)


class TestSpread(PageStoreSuite):
    @pytest.fixture
    def place(self):
        return SpreadPlace()


@pytest.fixture
def place():
    return SpreadPlace()


def filled(place) -> tuple[SpreadPages, Driver]:
    """Six segments with a page in each, two on each root."""
    store = place.store()
    store.open()
    driver = Driver(store, GEOMETRY)
    for segment in range(6):
        make_least_full(place, store, segment)
        assert driver.write(page_id(str(segment)), Address(segment, 0)).outcome is Outcome.OK
    return store, driver


def make_least_full(place, store, segment):
    """Memory has no end, so what is free is said here."""
    for root, medium in zip(place.roots, (p.medium for p in place.places), strict=True):
        root.available_bytes = lambda medium=medium: 1000 - len(medium.segments)
    store.create_segment(segment, NAMESPACE, GEOMETRY)


def outcomes(driver) -> list[Outcome]:
    return [driver.read(page_id(str(s)), Address(s, 0)).result.outcome for s in range(6)]


def test_segments_go_where_most_room_is_and_each_lies_on_one_root(place):
    store, driver = filled(place)
    assert sorted(len(p.medium.segments) for p in place.places) == [2, 2, 2]
    assert all(len(place.holders(segment)) == 1 for segment in range(6))
    assert outcomes(driver) == [Outcome.OK] * 6
    assert [facts.segment for facts in store.segments()] == list(range(6))


def test_another_process_finds_all_of_them(place):
    filled(place)[0].close()
    other = place.store()
    other.open()
    assert outcomes(Driver(other, GEOMETRY)) == [Outcome.OK] * 6


def test_a_full_root_is_passed_over(place):
    store, _ = filled(place)
    for root in place.roots[:2]:
        root.create_segment = refuse
    place.roots[0].available_bytes = lambda: 1 << 50
    store.create_segment(6, NAMESPACE, GEOMETRY)
    assert place.holders(6) == [2]
    place.roots[2].create_segment = refuse
    with pytest.raises(ExhaustedError):
        store.create_segment(7, NAMESPACE, GEOMETRY)


def refuse(*_):
    raise ExhaustedError("pages.no_space", "full")


def test_a_root_whose_reads_fail_is_out_for_a_while_and_the_others_go_on(place, monkeypatch):
    store, driver = filled(place)
    bad = place.holders(0)[0]
    place.roots[bad].is_broken = True
    while store.out_count() == 0:
        assert driver.read(page_id("0"), Address(0, 0)).result.outcome is Outcome.IO_ERROR
    place.roots[bad].is_broken = False
    expected = [Outcome.IO_ERROR if place.holders(s) == [bad] else Outcome.OK for s in range(6)]
    assert outcomes(driver) == expected  # not asked any more, and never ABSENT
    assert expected.count(Outcome.OK) == 4
    make_least_full(place, store, 6)
    assert place.holders(6) != [bad]
    place.clock.advance(spread.OUT_S)
    assert outcomes(driver) == [Outcome.OK] * 6


def test_a_root_that_says_nothing_takes_no_more(place):
    store, driver = filled(place)
    silent = place.holders(0)[0]
    place.roots[silent].is_silent = True
    hanging = store.submit_reads([driver.extent(page_id("0"), Address(0, 0))])
    place.clock.advance(spread.HANG_S + 1)
    assert store.out_count() == 1
    job = store.submit_reads([driver.extent(page_id("0"), Address(0, 0), None, 1)])
    assert [(r.job, r.outcome) for r in store.poll()] == [(job, Outcome.IO_ERROR)]
    place.roots[silent].is_silent = False
    assert [(r.job, r.outcome) for r in store.poll()] == [(hanging, Outcome.OK)]
    assert store.out_count() == 0


def test_a_root_that_does_not_open_is_left_out(place):
    filled(place)[0].close()
    lost = place.holders(0)[0] or 1
    store = place.store()
    open_others = store._make_others

    def with_one_gone(facts):
        others = open_others(facts)
        place.roots[lost].is_gone = True
        return others

    store._make_others = with_one_gone
    store.open()
    assert store.out_count() == 1
    found = outcomes(Driver(store, GEOMETRY))
    assert (found.count(Outcome.OK), found.count(Outcome.IO_ERROR)) == (4, 2)
    segment = next(s for s in range(6) if place.holders(s) == [lost])
    with pytest.raises(UnavailableError):
        store.delete_segment(segment)  # so that its pages are not forgotten
    assert place.holders(segment) == [lost]


def test_a_root_of_another_store_is_refused(place):
    place.places[2].store().open()
    with pytest.raises(ConfigError, match="another store"):
        place.store().open()


def test_what_was_deleted_elsewhere_is_absent_and_looked_for_anew(place):
    _, driver = filled(place)
    holder = place.holders(0)[0]
    segment = place.places[holder].medium.segments.pop(0)
    read = driver.read(page_id("0"), Address(0, 0))
    assert read.result.outcome is Outcome.ABSENT
    place.places[(holder + 1) % ROOT_COUNT].medium.segments[0] = segment
    assert driver.read(page_id("0"), Address(0, 0)).result.outcome is Outcome.OK


def test_a_root_that_fails_again_is_left_out_for_longer(place):
    """Each time it is tried, stores are lost."""
    store, driver = filled(place)
    bad = place.holders(0)[0]
    place.roots[bad].is_broken = True
    for out_s in (spread.OUT_S, 2 * spread.OUT_S, 4 * spread.OUT_S):
        while store.out_count() == 0:
            driver.read(page_id("0"), Address(0, 0))
        place.clock.advance(out_s - 1)
        assert store.out_count() == 1
        place.clock.advance(1)
    place.roots[bad].is_broken = False
    assert outcomes(driver) == [Outcome.OK] * 6
    place.roots[bad].is_broken = True
    while store.out_count() == 0:
        driver.read(page_id("0"), Address(0, 0))
    place.clock.advance(spread.OUT_S)
    assert store.out_count() == 0


def test_a_segment_of_a_root_that_is_out_cannot_be_asked_for_or_deleted(place):
    store, driver = filled(place)
    bad = place.holders(0)[0]
    place.roots[bad].is_broken = True
    while store.out_count() == 0:
        driver.read(page_id("0"), Address(0, 0))
    for verb in (store.has_segment, store.delete_segment):
        with pytest.raises(UnavailableError):
            verb(0)
    assert place.holders(0) == [bad]
    other = next(s for s in range(6) if place.holders(s) != [bad])
    assert store.has_segment(other)


def test_a_number_that_was_used_twice_is_listed_twice_and_goes_from_both_roots(place):
    store, _ = filled(place)
    home, other = place.holders(0)[0], (place.holders(0)[0] + 1) % ROOT_COUNT
    place.places[other].medium.segments[0] = place.places[home].medium.segments[0]
    assert [facts.segment for facts in store.segments()].count(0) == 2
    store.delete_segment(0)
    assert place.holders(0) == []


def test_a_batch_over_all_roots_has_each_result_once(place):
    _, driver = filled(place)
    extents = [driver.extent(page_id(str(s)), Address(s, 0), None, s) for s in range(4)]
    job = driver.store.submit_reads(extents)
    results = driver.results(4)
    assert sorted((r.index, r.outcome) for r in results) == [(i, Outcome.OK) for i in range(4)]
    assert {r.job for r in results} == {job}
    assert driver.store.poll() == []


# On real folders.


def opened(tmp_path, names=("a", "b", "c")) -> SpreadPages:
    pytest.importorskip("kvferry._native", reason="posix pages need the native extension")
    urls = [f"posix://{tmp_path}/{name}" for name in names]
    return open_roots(urls, SystemClock(), ASKED)


def test_folders_are_roots_of_one_store(tmp_path):
    store = opened(tmp_path)
    store.create_segment(1, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    assert driver.write(page_id("a"), Address(1, 3)).outcome is Outcome.OK
    store.close()
    again = opened(tmp_path)
    assert Driver(again, GEOMETRY).read(page_id("a"), Address(1, 3)).result.outcome is Outcome.OK
    assert again.out_count() == 0
    again.close()


def test_a_mount_that_is_missing_is_not_taken_for_a_new_root(tmp_path):
    opened(tmp_path).close()
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    (tmp_path / "b").mkdir()
    store = opened(tmp_path, ["a", "b", "c", "d"])  # d is new
    assert store.out_count() == 1
    assert list((tmp_path / "b").iterdir()) == []
    store.close()
    (tmp_path / "b").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "b")
    store = opened(tmp_path, ["a", "b", "c", "d"])
    assert store.out_count() == 0
    store.close()


def test_a_root_that_is_not_named_is_out(tmp_path):
    """Else whoever names fewer roots evicts, forgets and clears what is on the others."""
    opened(tmp_path).close()
    for names in (["a"], ["a", "c"]):
        store = opened(tmp_path, names)
        assert store.out_count() == 3 - len(names)
        with pytest.raises(UnavailableError):
            store.delete_segment(1)
        read = Driver(store, GEOMETRY).read(page_id("a"), Address(1, 3))
        assert read.result.outcome is Outcome.IO_ERROR
        store.close()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    store = opened(tmp_path, ["a", "link", "c"])
    assert store.out_count() == 0
    store.close()


@pytest.mark.parametrize("names", [["b"], ["b", "a"]])
def test_a_further_root_is_nobodys_home(tmp_path, names):
    """The owner's word is in the home: of two homes each would have an owner."""
    opened(tmp_path, ["a", "b"]).close()
    with pytest.raises(ConfigError, match="first root first"):
        opened(tmp_path, names)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_mount_that_goes_while_the_store_is_open_has_lost_nothing(tmp_path, names, is_swapped):
    """Its pages were ABSENT, so engines evicted them; its segments counted as deleted."""
    store = opened(tmp_path, names)
    store.create_segment(1, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    assert driver.write(page_id("a"), Address(1, 3)).outcome is Outcome.OK
    (root,) = (tmp_path / n for n in names if (tmp_path / n / "segments/00000001.seg").exists())
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    if is_swapped:
        other = open_roots([f"posix://{root}"], SystemClock(), ASKED)
        other.create_segment(1, NAMESPACE, GEOMETRY)
        other.close()
    assert driver.read(page_id("a"), Address(1, 3)).result.outcome is Outcome.IO_ERROR
    assert driver.write(page_id("a"), Address(1, 3)).outcome is Outcome.IO_ERROR
    with pytest.raises(UnavailableError):
        store.delete_segment(1)
    assert (root / "segments/00000001.seg").exists() == is_swapped
    if is_swapped:
        shutil.rmtree(root)
    else:
        root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    assert driver.read(page_id("a"), Address(1, 3)).result.outcome is Outcome.OK
    store.close()
