"""What every page store must do: subclass `PageStoreSuite` and give it a `place`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import pytest

from kvferry.errors import ClosedError, ConfigError, IncompatibleError
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages import header
from kvferry.pages.base import Outcome, PageStore, slot_count
from kvferry.pages.facts import Asked
from kvferry.testing.places import ASKED
from kvferry.testing.staging import Driver, page_id

GEOMETRY = PageGeometry(slice_count=4, payload_bytes=5000, chunk_tokens=16)
OTHER_GEOMETRY = PageGeometry(slice_count=2, payload_bytes=9000, chunk_tokens=16)
NAMESPACE = b"n" * 32
OTHER_NAMESPACE = b"o" * 32
HOME = Address(segment=1, slot=3)


class Place(Protocol):
    """A medium under test: stores over it are processes that share it."""

    digest: header.Digest  # the checksum that its stores use

    def store(self, asked: Asked = ASKED) -> PageStore:
        """A store over this medium, not open."""

    def page(self, address: Address) -> bytes:
        """The stored bytes of a page, beneath every check."""

    def replace_page(self, address: Address, content: bytes) -> None:
        """Overwrites the stored bytes of a page; shorter content cuts the medium off after it."""


class PageStoreSuite:
    """Conformance of a `PageStore`. A subclass overrides the fixture `place`."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def store(self, place: Place) -> Iterator[PageStore]:
        store = place.store()
        store.open()
        store.create_segment(HOME.segment, NAMESPACE, GEOMETRY)
        yield store
        store.close()

    @pytest.fixture
    def driver(self, store: PageStore) -> Driver:
        return Driver(store, GEOMETRY)

    # What is written is what is read.

    def test_a_page_is_read_back_by_another_process(self, place, store, driver):
        page = page_id("a")
        assert driver.write(page, HOME).outcome is Outcome.OK
        store.close()
        other = place.store()
        other.open()
        reader = Driver(other, GEOMETRY)
        read = reader.read(page, HOME)
        assert read.result.outcome is Outcome.OK
        assert read.payloads == reader.expected(reader.extent(page, HOME))
        other.close()

    @pytest.mark.parametrize("written", [1, 2, 4])
    @pytest.mark.parametrize("asked", [1, 2, 4])
    def test_ranks_of_any_number_read_what_others_wrote(self, driver, written, asked):
        page = page_id("a")
        for first in range(0, 4, written):
            assert driver.write(page, HOME, range(first, first + written)).outcome is Outcome.OK
        for first in range(0, 4, asked):
            slices = range(first, first + asked)
            read = driver.read(page, HOME, slices)
            assert read.result.outcome is Outcome.OK
            assert read.payloads == driver.expected(driver.extent(page, HOME, slices))

    def test_stored_bytes_are_the_documented_format(self, place, driver):
        page = page_id("a")
        extent = driver.extent(page, HOME)
        driver.write(page, HOME)
        stored = place.page(HOME)
        for index, content in enumerate(driver.expected(extent)):
            padded = content.ljust(GEOMETRY.padded_payload_bytes, b"\0")
            block = header.pack(page, GEOMETRY, index, place.digest(padded), place.digest)
            start = index * GEOMETRY.slice_bytes
            assert stored[start : start + GEOMETRY.slice_bytes] == block + padded

    def test_slots_do_not_overlap(self, place, store, driver):
        count = slot_count(store.open(), GEOMETRY)
        for slot in range(count):
            driver.write(page_id(str(slot)), Address(1, slot))
        for slot in range(count):
            read = driver.read(page_id(str(slot)), Address(1, slot))
            assert read.result.outcome is Outcome.OK

    def test_leaving_room_to_others_changes_no_result(self, store, driver):
        page = page_id("a")
        for is_wanted in (True, False):
            store.leave_room(is_wanted)
            assert driver.write(page, HOME).outcome is Outcome.OK
            read = driver.read(page, HOME)
            assert read.payloads == driver.expected(driver.extent(page, HOME))

    # Each result arrives exactly once.

    def test_every_operation_of_every_batch_has_one_result(self, driver):
        pages = [page_id(str(slot)) for slot in range(16)]
        addresses = [Address(1, slot) for slot in range(16)]
        for start in range(0, 16, 4):
            extents = [
                driver.extent(pages[start + i], addresses[start + i], None, i) for i in range(4)
            ]
            for extent in extents:
                driver.fill(extent)
            driver.store.submit_writes(extents)
            assert [r.outcome for r in driver.results(4)] == [Outcome.OK] * 4
        jobs = [
            driver.store.submit_reads([driver.extent(pages[i], addresses[i], None, i % 4)])
            for i in range(4)
        ]
        assert len(set(jobs)) == 4
        results = driver.results(4)
        assert [(r.job, r.index) for r in results] == [(job, 0) for job in sorted(jobs)]
        assert driver.store.poll() == []

    def test_a_batch_may_mix_good_bad_verified_and_unverified(self, place, driver):
        good, bad = page_id("good"), page_id("bad")
        driver.write(good, Address(1, 0))
        driver.write(bad, Address(1, 1))
        flip_payload(place, Address(1, 1))
        reads = [
            driver.extent(good, Address(1, 0), None, 0),
            driver.extent(good, Address(9, 0), None, 1),
            driver.extent(bad, Address(1, 1), None, 2),
            replace(driver.extent(bad, Address(1, 1), None, 3), verify_payload=False),
        ]
        driver.store.submit_reads(reads)
        assert [r.outcome for r in driver.results(4)] == [
            Outcome.OK,
            Outcome.ABSENT,
            Outcome.CORRUPT,
            Outcome.OK,
        ]
        assert driver.payloads(reads[0]) == driver.expected(reads[0])

    def test_an_empty_batch_is_a_batch_without_results(self, driver):
        driver.store.submit_reads([])
        driver.store.submit_writes([])
        assert driver.store.poll() == []

    # What is not there, or is another's, is a miss.

    def test_holes_and_missing_segments_are_absent(self, driver):
        page = page_id("a")
        assert driver.read(page, HOME).result.outcome is Outcome.ABSENT
        assert driver.read(page, Address(5, 0)).result.outcome is Outcome.ABSENT
        assert driver.read(page, Address(1, 10_000)).result.outcome is Outcome.ABSENT

    def test_a_write_makes_no_segment(self, store, driver):
        assert driver.write(page_id("a"), Address(5, 0)).outcome is Outcome.ABSENT
        assert driver.write(page_id("a"), Address(1, 10_000)).outcome is Outcome.ABSENT
        assert [found.segment for found in store.segments()] == [1]

    @pytest.mark.parametrize(
        "other",
        [
            {"generation": b"g" * 16},
            {"key": b"k" * 32},
            {"namespace": OTHER_NAMESPACE},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_page_of_another_identity_is_foreign(self, driver, other):
        page = page_id("a")
        driver.write(page, HOME)
        assert driver.read(replace(page, **other), HOME).result.outcome is Outcome.FOREIGN
        assert driver.read(page, HOME).result.outcome is Outcome.OK

    def test_a_new_writer_makes_the_old_generation_foreign(self, driver):
        old, new = page_id("a", generation=1), page_id("a", generation=2)
        driver.write(old, HOME)
        driver.write(new, HOME)
        assert driver.read(old, HOME).result.outcome is Outcome.FOREIGN
        assert driver.read(new, HOME).result.outcome is Outcome.OK

    def test_slices_of_two_writers_are_not_a_page(self, driver):
        old, new = page_id("a", generation=1), page_id("a", generation=2)
        driver.write(old, HOME)
        driver.write(new, HOME, range(0, 2))
        assert driver.read(new, HOME).result.outcome is Outcome.FOREIGN
        assert driver.read(old, HOME).result.outcome is Outcome.FOREIGN
        assert driver.read(new, HOME, range(0, 2)).result.outcome is Outcome.OK

    def test_slices_in_the_wrong_place_are_foreign(self, place, driver):
        page = page_id("a")
        driver.write(page, HOME)
        stored = place.page(HOME)
        first, second = stored[: GEOMETRY.slice_bytes], stored[GEOMETRY.slice_bytes :]
        second, rest = second[: GEOMETRY.slice_bytes], second[GEOMETRY.slice_bytes :]
        place.replace_page(HOME, second + first + rest)
        assert driver.read(page, HOME).result.outcome is Outcome.FOREIGN

    def test_a_segment_of_another_kind_is_neither_read_nor_written(self, place, store, driver):
        page = page_id("a")
        driver.write(page, HOME)
        before = place.page(HOME)
        other = Driver(store, OTHER_GEOMETRY)
        assert other.write(page, HOME).outcome is Outcome.FOREIGN
        assert other.read(page, HOME).result.outcome is Outcome.FOREIGN
        assert driver.write(replace(page, namespace=OTHER_NAMESPACE), HOME).outcome is (
            Outcome.FOREIGN
        )
        assert place.page(HOME) == before

    # Damage is found.

    @pytest.mark.parametrize("offset", [0, 8, 16, 150, 170, 250, 4000])
    def test_a_damaged_header_is_corrupt(self, place, driver, offset):
        page = page_id("a")
        driver.write(page, HOME)
        flip(place, HOME, GEOMETRY.slice_bytes + offset)
        assert driver.read(page, HOME).result.outcome is Outcome.CORRUPT
        assert driver.read(page, HOME, range(0, 1)).result.outcome is Outcome.OK

    def test_a_damaged_payload_is_corrupt(self, place, driver):
        page = page_id("a")
        driver.write(page, HOME)
        flip_payload(place, HOME)
        assert driver.read(page, HOME).result.outcome is Outcome.CORRUPT

    def test_a_page_that_is_cut_off_is_short(self, place, driver):
        page = page_id("a")
        driver.write(page, HOME)
        place.replace_page(HOME, place.page(HOME)[: 2 * GEOMETRY.slice_bytes + 4096])
        assert driver.read(page, HOME).result.outcome is Outcome.SHORT
        assert driver.read(page, HOME, range(0, 2)).result.outcome is Outcome.OK

    def test_unverified_reads_leave_the_checksum_to_the_caller(self, place, driver):
        page = page_id("a")
        driver.write(page, HOME)
        right = driver.read(page, HOME).result.checksums
        flip_payload(place, HOME)
        read = driver.read(page, HOME, verify_payload=False)
        assert read.result.outcome is Outcome.OK
        padded = [p.ljust(GEOMETRY.padded_payload_bytes, b"\0") for p in read.payloads]
        assert read.result.checksums == right
        assert [place.digest(p) == c for p, c in zip(padded, right, strict=True)] == [
            False,
            True,
            True,
            True,
        ]

    def test_checksums_of_the_writer_are_taken_at_their_word(self, place, driver):
        page = page_id("a")
        extent = driver.extent(page, HOME)
        padded = [p.ljust(GEOMETRY.padded_payload_bytes, b"\0") for p in driver.expected(extent)]
        right = tuple(place.digest(content) for content in padded)
        wrong = (*right[:3], right[3] ^ 1)
        for checksums, outcome in ((right, Outcome.OK), (wrong, Outcome.CORRUPT)):
            driver.fill(extent)
            job = driver.store.submit_writes([replace(extent, checksums=checksums)])
            assert driver.one_result(job).outcome is Outcome.OK
            assert driver.read(page, HOME).result.outcome is outcome

    # Segments.

    def test_creating_a_segment_again_keeps_it(self, store, driver):
        page = page_id("a")
        driver.write(page, HOME)
        store.create_segment(1, NAMESPACE, GEOMETRY)
        assert driver.read(page, HOME).result.outcome is Outcome.OK
        with pytest.raises(IncompatibleError):
            store.create_segment(1, OTHER_NAMESPACE, GEOMETRY)
        with pytest.raises(IncompatibleError):
            store.create_segment(1, NAMESPACE, OTHER_GEOMETRY)
        assert driver.read(page, HOME).result.outcome is Outcome.OK

    def test_a_segment_too_small_for_a_page_is_refused(self, store):
        with pytest.raises(ConfigError, match="segment_bytes"):
            store.create_segment(2, NAMESPACE, PageGeometry(1, 1 << 20, 16))
        assert [found.segment for found in store.segments()] == [1]

    def test_segments_are_listed_as_they_were_made(self, place, store):
        store.create_segment(300, OTHER_NAMESPACE, OTHER_GEOMETRY)
        for process in (store, place.store()):
            facts = process.open()
            home, other = process.segments()
            assert (home.segment, home.namespace, home.geometry) == (1, NAMESPACE, GEOMETRY)
            assert (other.segment, other.namespace) == (300, OTHER_NAMESPACE)
            assert other.geometry == OTHER_GEOMETRY
            assert other.slot_count == slot_count(facts, OTHER_GEOMETRY)

    def test_a_deleted_segment_gives_its_space_back(self, store, driver):
        page = page_id("a")
        driver.write(page, HOME)
        before = store.used_bytes()
        store.delete_segment(1)
        assert before - store.used_bytes() >= 1 << 20
        assert driver.read(page, HOME).result.outcome is Outcome.ABSENT
        assert store.segments() == []
        store.delete_segment(1)

    def test_whether_a_segment_is_there_can_be_asked(self, store):
        assert store.has_segment(1)
        store.delete_segment(1)
        assert not store.has_segment(1)

    def test_capacity_is_what_segments_take(self, store):
        for segment in range(1, 9):
            store.create_segment(segment, NAMESPACE, GEOMETRY)
        assert 8 << 20 <= store.used_bytes() <= (8 << 20) + (64 << 10)

    def test_a_number_used_again_is_the_new_segment_for_all(self, place, store, driver):
        page = page_id("a")
        other = place.store()
        other.open()
        reader = Driver(other, GEOMETRY)
        driver.write(page, HOME)
        assert reader.read(page, HOME).result.outcome is Outcome.OK
        store.delete_segment(1)
        assert reader.read(page, HOME).result.outcome is Outcome.ABSENT
        store.create_segment(1, NAMESPACE, GEOMETRY)
        assert reader.read(page, HOME).result.outcome is Outcome.ABSENT
        assert reader.write(page, HOME).outcome is Outcome.OK
        assert driver.read(page, HOME).result.outcome is Outcome.OK
        other.close()

    # Scan.

    def test_scan_finds_whole_pages_only(self, place, store, driver):
        whole, half, mixed, damaged = (page_id(n, index=4) for n in ("w", "h", "m", "d"))
        driver.write(whole, Address(1, 2))
        driver.write(half, Address(1, 4), range(0, 3))
        driver.write(mixed, Address(1, 5))
        driver.write(replace(mixed, generation=b"g" * 16), Address(1, 5), range(2, 4))
        driver.write(damaged, Address(1, 6))
        flip(place, Address(1, 6), 3 * GEOMETRY.slice_bytes + 20)
        assert [(f.page, f.address) for f in store.scan(1)] == [(whole, Address(1, 2))]

    def test_scan_of_a_missing_segment_finds_nothing(self, store):
        assert list(store.scan(77)) == []

    def test_scan_skips_pages_of_another_namespace(self, place, store, driver):
        driver.write(page_id("a"), HOME)
        store.create_segment(2, OTHER_NAMESPACE, GEOMETRY)
        driver.write(page_id("b", namespace=OTHER_NAMESPACE), Address(2, 3))
        place.replace_page(HOME, place.page(Address(2, 3)))
        assert list(store.scan(1)) == []
        assert len(list(store.scan(2))) == 1

    # Open and close.

    def test_a_store_is_the_same_for_all_who_open_it(self, place, store):
        other = place.store()
        assert other.open() == store.open()
        assert len(other.open().store_id) == 16
        other.close()

    def test_what_the_configuration_leaves_out_is_as_the_store_was_made(self, place, store):
        other = place.store(Asked())
        assert other.open() == store.open()
        other.close()

    def test_another_capacity_is_refused_with_both_figures(self, place, store):
        with pytest.raises(ConfigError, match=r"16777216.*8388608.*kvferry resize"):
            place.store(replace(ASKED, capacity_bytes=16 << 20)).open()

    @pytest.mark.parametrize("change", [{"alignment_bytes": 8192}, {"segment_bytes": 2 << 20}])
    def test_another_shape_is_refused_by_name(self, place, store, change):
        with pytest.raises(ConfigError, match=next(iter(change))):
            place.store(replace(ASKED, **change)).open()

    def test_a_new_store_needs_a_capacity(self, place):
        with pytest.raises(ConfigError, match="capacity_bytes"):
            place.store(Asked()).open()

    def test_close_waits_for_what_is_in_flight(self, place, store, driver):
        extents = [driver.extent(page_id(str(n)), Address(1, n), None, n) for n in range(4)]
        for extent in extents:
            driver.fill(extent)
        store.submit_writes(extents)
        store.close()
        other = place.store()
        other.open()
        reader = Driver(other, GEOMETRY)
        for extent in extents:
            assert reader.read(extent.page, extent.address).result.outcome is Outcome.OK
        other.close()

    def test_close_ends_use(self, store, driver):
        driver.store.submit_reads([driver.extent(page_id("a"), HOME)])
        store.close()
        store.close()
        with pytest.raises(ClosedError):
            store.submit_reads([])
        with pytest.raises(ClosedError):
            store.poll()
        with pytest.raises(ClosedError):
            store.create_segment(2, NAMESPACE, GEOMETRY)

    def test_memory_that_was_not_registered_is_refused(self, store, driver):
        stray = Driver(store, GEOMETRY, page_count=1)
        extent = replace(
            stray.extent(page_id("a"), HOME),
            buffer_address=stray.buffer.address + GEOMETRY.slice_bytes,
        )
        for submit in (store.submit_reads, store.submit_writes):
            with pytest.raises(AssertionError):
                submit([extent])


def flip(place: Place, address: Address, offset_bytes: int, bit: int = 0) -> None:
    """Flips one stored bit of a page."""
    content = bytearray(place.page(address))
    content[offset_bytes] ^= 1 << bit
    place.replace_page(address, bytes(content))


def flip_payload(place: Place, address: Address) -> None:
    """Flips one stored bit in the payload of a page's first slice."""
    flip(place, address, HEADER_BYTES + 100, 3)
