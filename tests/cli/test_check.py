"""After trouble with a disk an operator must learn exactly which pages are bad, and be rid of them
without losing a good one."""

import json

import pytest

from kvferry.catalog.base import Commit, Space, Verdict
from kvferry.catalog.memory import MemoryCatalog
from kvferry.cli import check, status, verification
from kvferry.cli.opened import OpenedStore
from kvferry.errors import UnavailableError
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages.base import slot_count
from kvferry.testing.clock import ManualClock
from kvferry.testing.places import MemoryPlace
from kvferry.testing.staging import Driver, page_id

GEOMETRY = PageGeometry(slice_count=4, payload_bytes=5000, chunk_tokens=16)
NAMESPACE = b"n" * 32
PAGE_COUNT = 5


class Filled:
    """A store and its catalog with `PAGE_COUNT` pages. `addresses`: where they are."""

    def __init__(self):
        clock = ManualClock()
        self.place = MemoryPlace(clock)
        self.pages = self.place.store()
        self.facts = self.pages.open()
        self.catalog = MemoryCatalog(clock)
        self.catalog.open(self.facts.store_id, self.facts.capacity_bytes, self.facts.segment_bytes)
        self.addresses: list[Address] = []
        self._make_segment()
        driver = Driver(self.pages, GEOMETRY)
        for index, slot in enumerate(self.catalog.reserve(NAMESPACE, PAGE_COUNT, lease_s=60.0)):
            page = page_id(f"page {index}", int.from_bytes(slot.generation, "big"), NAMESPACE)
            assert driver.write(page, slot.address).outcome.value == "ok"
            commit = Commit(page.key, page.parent, 0, slot, 0, GEOMETRY.slice_count)
            assert self.catalog.commit(NAMESPACE, [commit]) == [Verdict.PUBLISHED]
            self.addresses.append(slot.address)

    def _make_segment(self):
        slots = slot_count(self.facts, GEOMETRY)
        slot_bytes = GEOMETRY.slot_bytes(self.facts.alignment_bytes)
        record = json.dumps({"model": "org/model", "dtype": "bfloat16"})
        space = Space(NAMESPACE, slots, slot_bytes, GEOMETRY.slice_count, 16, record)
        self.catalog.attach(space)
        segment = self.catalog.grow(NAMESPACE)
        self.pages.create_segment(segment, NAMESPACE, GEOMETRY)
        self.catalog.grown(segment)

    def opened(self, *, with_catalog: bool = True) -> OpenedStore:
        catalog = self.catalog if with_catalog else None
        return OpenedStore(self.pages, self.facts, catalog, "memory:")

    def damage(self, index: int, offset_bytes: int) -> None:
        """Flips one bit of a stored page."""
        content = bytearray(self.place.page(self.addresses[index]))
        content[offset_bytes] ^= 1
        self.place.replace_page(self.addresses[index], bytes(content))


@pytest.fixture
def filled():
    return Filled()


def test_a_good_store_is_clean(filled):
    report = check.examine(filled.opened(), fix=False)
    assert report.is_clean
    assert report.checked_count == PAGE_COUNT


@pytest.mark.parametrize(
    "offset_bytes", [20, HEADER_BYTES + 100, 3 * GEOMETRY.slice_bytes + HEADER_BYTES + 4999]
)
def test_one_flipped_bit_is_found_in_any_slice(filled, offset_bytes):
    filled.damage(2, offset_bytes)
    report = check.examine(filled.opened(), fix=False)
    assert [(page.slot, page.outcome) for page in report.bad] == [
        (filled.addresses[2].slot, "corrupt")
    ]
    assert report.dropped_count == 0


def test_a_page_in_anothers_place_is_found(filled):
    filled.place.replace_page(filled.addresses[0], filled.place.page(filled.addresses[1]))
    report = check.examine(filled.opened(), fix=False)
    assert [page.outcome for page in report.bad] == ["foreign"]


def test_a_lost_segment_makes_all_its_pages_bad(filled):
    filled.pages.delete_segment(filled.addresses[0].segment)
    report = check.examine(filled.opened(), fix=False)
    assert [page.outcome for page in report.bad] == ["absent"] * PAGE_COUNT


def test_a_page_that_was_evicted_meanwhile_is_not_bad(filled, monkeypatch):
    """Engines go on while a store is read, which takes long."""
    promised = verification.promised

    def promised_then_evicted(snapshot, segments):
        found = promised(snapshot, segments)
        page = page_id("page 2")
        evicted = snapshot.pages[NAMESPACE, page.key].generation
        assert filled.catalog.evict(NAMESPACE, [(page.key, evicted)]) == 1
        filled.damage(2, HEADER_BYTES)
        filled.damage(3, HEADER_BYTES)
        return found

    monkeypatch.setattr(verification, "promised", promised_then_evicted)
    report = check.examine(filled.opened(), fix=False)
    assert [page.key for page in report.bad] == [page_id("page 3").key.hex()]


def test_fix_drops_the_bad_page_and_no_other(filled):
    filled.damage(2, HEADER_BYTES)
    report = check.examine(filled.opened(), fix=True)
    assert report.dropped_count == 1
    assert not report.is_clean
    keys = [page_id(f"page {index}").key for index in range(PAGE_COUNT)]
    hits = [hit is not None for hit in filled.catalog.lookup(NAMESPACE, keys)]
    assert hits == [True, True, False, True, True]
    assert check.examine(filled.opened(), fix=False).is_clean


def test_what_may_come_back_is_not_dropped(filled, monkeypatch):
    """Its root is out."""

    def is_out(_):
        raise UnavailableError("pages.roots", "it may be on a root that is out")

    filled.pages.delete_segment(filled.addresses[0].segment)
    monkeypatch.setattr(filled.pages, "has_segment", is_out)
    report = check.examine(filled.opened(), fix=True)
    assert [page.outcome for page in report.bad] == ["io_error"] * PAGE_COUNT
    assert report.dropped_count == 0
    monkeypatch.undo()
    assert check.examine(filled.opened(), fix=True).dropped_count == PAGE_COUNT


def test_without_a_catalog_what_lies_on_the_store_is_read(filled):
    filled.damage(1, HEADER_BYTES)
    report = check.examine(filled.opened(with_catalog=False), fix=True)
    assert report.checked_count == PAGE_COUNT
    assert [page.outcome for page in report.bad] == ["corrupt"]
    assert report.dropped_count == 0


def test_status_counts_by_namespace(filled):
    key = page_id("page 0").key
    filled.catalog.lookup(NAMESPACE, [key, b"?" * 32, b"!" * 32, b"." * 32])
    report = status.examine(filled.opened())
    assert report.used_bytes > 0
    assert report.catalog.pages == report.catalog.published == PAGE_COUNT
    assert report.catalog.hit_rate == 0.25
    (space,) = report.catalog.namespaces
    assert space.namespace == NAMESPACE.hex()
    assert space.bytes == PAGE_COUNT * GEOMETRY.slot_bytes(4096)


def test_status_without_a_catalog_says_so(filled, capsys):
    status._print(status.examine(filled.opened(with_catalog=False)))
    assert "no catalog" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("org/model", "org/model"),
        ({"commit": "c" * 40, "name": "org/model"}, "org/model"),
        ({"folder": "ab" * 32}, "folder abababababab"),
        ({"dummy": {"layers": 2}, "seed": 0}, "dummy"),
    ],
)
def test_status_names_the_model_for_people(model, text):
    assert status.model_name(json.dumps({"model": model})) == text


def test_a_description_that_is_too_deep_is_shown_as_it_is():
    """Any engine writes one; it ended `status`, and the thread of the dashboard."""
    assert status.model_name("[" * 100_000) == "[" * 40


def test_what_a_smaller_store_has_too_much_is_told_with_the_cure(filled, capsys):
    facts = filled.facts
    filled.catalog.open(facts.store_id, facts.segment_bytes // 2, facts.segment_bytes)
    report = check.examine(filled.opened(), fix=False)
    check._print(report)

    assert report.excess_bytes == facts.segment_bytes - facts.segment_bytes // 2
    assert "the next engine that starts" in capsys.readouterr().out


def test_status_shows_the_model(filled, capsys):
    status._print(status.examine(filled.opened()))
    assert "org/model" in capsys.readouterr().out
