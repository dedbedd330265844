"""Thousands of ways to damage a store: a read says OK exactly if the right bytes are stored.

What a user would lose: an answer computed from another prompt's, or half-written, KV cache.
"""

import random
from dataclasses import replace

import pytest

from kvferry.layout import Address, PageGeometry
from kvferry.pages.base import Outcome
from kvferry.pages.facts import Asked
from kvferry.testing.clock import ManualClock
from kvferry.testing.places import MemoryPlace
from kvferry.testing.staging import Driver, page_id

GEOMETRY = PageGeometry(slice_count=3, payload_bytes=5000, chunk_tokens=16)
PAGE_BYTES = GEOMETRY.page_bytes
SLICE_BYTES = GEOMETRY.slice_bytes
NAMESPACE, OTHER_NAMESPACE = b"n" * 32, b"o" * 32
ASKED = Asked(capacity_bytes=8 << 20, alignment_bytes=4096, segment_bytes=1 << 18)
SLOTS = [Address(1, 0), Address(1, 1), Address(1, 2), Address(2, 0)]


class Disk:
    """Pages of three kinds in their slots, with what was in the slots before, and a reader."""

    def __init__(self, place):
        self.place = place
        store = place.store(ASKED)
        store.open()
        for segment in (1, 2):
            store.create_segment(segment, NAMESPACE, GEOMETRY)
        store.create_segment(3, OTHER_NAMESPACE, GEOMETRY)
        self.driver = Driver(store, GEOMETRY, page_count=GEOMETRY.slice_count)
        self.old = self._write(generation=1)
        self.new = self._write(generation=2)
        other = page_id("0", 2, OTHER_NAMESPACE)
        assert self.driver.write(other, Address(3, 0)).outcome is Outcome.OK
        self.of_another_namespace = place.page(Address(3, 0))

    def _write(self, generation: int) -> dict[Address, bytes]:
        for address, page in self.pages(generation).items():
            assert self.driver.write(page, address).outcome is Outcome.OK
        return {address: self.place.page(address) for address in SLOTS}

    def pages(self, generation: int = 2):
        """What each slot should hold; two of them are of one key."""
        names = ("0", "1", "2", "0")
        pages = [page_id(name, generation) for name in names]
        pages[3] = replace(pages[3], generation=bytes([generation]) * 16)
        return dict(zip(SLOTS, pages, strict=True))

    def read(self, address: Address, parts: list[range]) -> list[tuple[Outcome, bool]]:
        """What a reader is told of parts of a slot's page, and whether it has the right bytes."""
        page, driver = self.pages()[address], self.driver
        extents = [driver.extent(page, address, part, n) for n, part in enumerate(parts)]
        for extent in extents:
            driver.spoil(extent)
        driver.store.submit_reads(extents)
        outcomes = [result.outcome for result in driver.results(len(parts))]
        right = [driver.payloads(extent) == driver.expected(extent) for extent in extents]
        return list(zip(outcomes, right, strict=True))


def flip_a_bit(disk: Disk, address: Address, rng: random.Random) -> bytes:
    content = bytearray(disk.new[address])
    in_header = rng.random() < 0.5
    offset = rng.randrange(256 if in_header else PAGE_BYTES)
    offset += rng.randrange(GEOMETRY.slice_count) * SLICE_BYTES if in_header else 0
    content[offset] ^= 1 << rng.randrange(8)
    return bytes(content)


def flip_some_bits(disk: Disk, address: Address, rng: random.Random) -> bytes:
    content = bytearray(disk.new[address])
    for _ in range(rng.randint(2, 40)):
        content[rng.randrange(PAGE_BYTES)] ^= 1 << rng.randrange(8)
    return bytes(content)


def zero_a_range(disk: Disk, address: Address, rng: random.Random) -> bytes:
    start, end = _range(rng)
    content = disk.new[address]
    return content[:start] + bytes(end - start) + content[end:]


def shift_a_range(disk: Disk, address: Address, rng: random.Random) -> bytes:
    start, end = _range(rng)
    content = disk.new[address]
    part = content[start:end]
    turn = rng.randrange(len(part))
    return content[:start] + part[turn:] + part[:turn] + content[end:]


def swap_two_words(disk: Disk, address: Address, rng: random.Random) -> bytes:
    content = bytearray(disk.new[address])
    one, two = (8 * rng.randrange(PAGE_BYTES // 8) for _ in range(2))
    content[one : one + 8], content[two : two + 8] = (
        content[two : two + 8],
        content[one : one + 8],
    )
    return bytes(content)


def take_another_slots_page(disk: Disk, address: Address, rng: random.Random) -> bytes:
    return disk.new[rng.choice(SLOTS)]


def replay_the_old_page(disk: Disk, address: Address, rng: random.Random) -> bytes:
    return disk.old[address]


def take_a_page_of_another_namespace(disk: Disk, address: Address, rng: random.Random) -> bytes:
    return disk.of_another_namespace


def write_half(disk: Disk, address: Address, rng: random.Random) -> bytes:
    cut = rng.choice([rng.randrange(PAGE_BYTES), 512 * rng.randrange(PAGE_BYTES // 512)])
    return disk.new[address][:cut] + disk.old[address][cut:]


def write_half_into_a_hole(disk: Disk, address: Address, rng: random.Random) -> bytes:
    cut = rng.randrange(PAGE_BYTES)
    return disk.new[address][:cut] + bytes(PAGE_BYTES - cut)


def mix_slices_of_two_writers(disk: Disk, address: Address, rng: random.Random) -> bytes:
    starts = range(0, PAGE_BYTES, SLICE_BYTES)
    versions = [rng.choice([disk.new, disk.old])[address] for _ in starts]
    return b"".join(v[s : s + SLICE_BYTES] for v, s in zip(versions, starts, strict=True))


def mix_header_and_payload(disk: Disk, address: Address, rng: random.Random) -> bytes:
    source = disk.old[address]
    content = bytearray(disk.new[address])
    for start in range(0, PAGE_BYTES, SLICE_BYTES):
        cut = rng.choice([0, 4096, SLICE_BYTES])
        content[start : start + cut] = source[start : start + cut]
    return bytes(content)


def exchange_slices(disk: Disk, address: Address, rng: random.Random) -> bytes:
    content = disk.new[address]
    starts = list(range(0, PAGE_BYTES, SLICE_BYTES))
    rng.shuffle(starts)
    return b"".join(content[start : start + SLICE_BYTES] for start in starts)


def cut_off(disk: Disk, address: Address, rng: random.Random) -> bytes:
    return disk.new[address][: rng.choice([rng.randrange(PAGE_BYTES), PAGE_BYTES - 1])]


def leave_alone(disk: Disk, address: Address, rng: random.Random) -> bytes:
    return disk.new[address]


DAMAGES = [
    flip_a_bit,
    flip_some_bits,
    zero_a_range,
    shift_a_range,
    swap_two_words,
    take_another_slots_page,
    replay_the_old_page,
    take_a_page_of_another_namespace,
    write_half,
    write_half_into_a_hole,
    mix_slices_of_two_writers,
    mix_header_and_payload,
    exchange_slices,
    cut_off,
    leave_alone,
]


def _range(rng: random.Random) -> tuple[int, int]:
    length_bytes = rng.choice([1, 8, 512, 4096, SLICE_BYTES])
    start = rng.randrange(PAGE_BYTES - length_bytes + 1)
    return start, start + length_bytes


def _check(disk: Disk, damage, case_count: int) -> int:
    """Runs cases of one kind; returns how many reads were refused."""
    rng = random.Random(damage.__name__)
    refused_count = 0
    for case in range(case_count):
        address = rng.choice(SLOTS)
        content = damage(disk, address, rng)
        disk.place.replace_page(address, content)
        firsts = range(GEOMETRY.slice_count)
        parts = [range(first, rng.randint(first, 2) + 1) for first in firsts]
        for part, (outcome, has_right_bytes) in zip(parts, disk.read(address, parts), strict=True):
            start, end = part.start * SLICE_BYTES, part.stop * SLICE_BYTES
            is_right = content[start:end] == disk.new[address][start:end]
            assert (outcome is Outcome.OK) == is_right, (damage.__name__, case, outcome)
            assert has_right_bytes or outcome is not Outcome.OK
            refused_count += outcome is not Outcome.OK
        for slot in SLOTS if len(content) < PAGE_BYTES else (address,):
            disk.place.replace_page(slot, disk.new[slot])
    return refused_count


def _posix(tmp_path, direct_io):
    module = pytest.importorskip("kvferry.testing.posix_place")
    return module.PosixPlace(tmp_path / "store", ManualClock(), direct_io=direct_io)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
class TestNeverWrong:
    def test_memory(self, damage):
        disk = Disk(MemoryPlace(ManualClock()))
        self._show(damage, _check(disk, damage, 150))

    def test_posix(self, damage, tmp_path):
        disk = Disk(_posix(tmp_path, "off"))
        self._show(damage, _check(disk, damage, 150))
        disk.driver.store.close()

    def test_posix_past_the_page_cache(self, damage, tmp_path):
        disk = Disk(_posix(tmp_path, "auto"))
        self._show(damage, _check(disk, damage, 8))
        disk.driver.store.close()

    def test_usrbio(self, damage, emulation):
        usrbio_place = pytest.importorskip("tests.pages.usrbio_place")
        disk = Disk(usrbio_place.UsrbioPlace(emulation))
        self._show(damage, _check(disk, damage, 20))
        disk.driver.store.close()

    def _show(self, damage, refused_count):
        assert (refused_count > 0) == (damage is not leave_alone)
