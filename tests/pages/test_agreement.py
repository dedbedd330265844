"""The reference and the real store say the same of the same history.

The simulated world runs on the reference: where the two differ, it proves nothing of real disks.
"""

import random
from dataclasses import replace

import pytest

from kvferry.errors import Error
from kvferry.layout import Address
from kvferry.pages.base import Outcome
from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import (
    GEOMETRY,
    NAMESPACE,
    OTHER_GEOMETRY,
    OTHER_NAMESPACE,
    Place,
    flip,
)
from kvferry.testing.places import MemoryPlace
from kvferry.testing.staging import Driver, page_id

STEP_COUNT = 60


class History:
    """One history, as it goes on one place: what each step came to."""

    def __init__(self, place: Place):
        self.place = place
        self.store = place.store()
        self.store.open()
        self.drivers = [Driver(self.store, g, 1) for g in (GEOMETRY, OTHER_GEOMETRY)]

    def create(self, segment: int, namespace: bytes, geometry) -> str | None:
        try:
            self.store.create_segment(segment, namespace, geometry)
        except Error as error:
            return error.kind
        return None

    def delete(self, segment: int) -> None:
        self.store.delete_segment(segment)

    def write(self, driver_index: int, page, address: Address, slices: range) -> Outcome:
        return self.drivers[driver_index].write(page, address, slices).outcome

    def read(self, driver_index: int, page, address: Address, slices: range, verify: bool):
        read = self.drivers[driver_index].read(page, address, slices, verify)
        is_ok = read.result.outcome is Outcome.OK
        return read.result.outcome, read.payloads if is_ok else None

    def damage(self, address: Address, offset: int, bit: int) -> None:
        if any(found.segment == address.segment for found in self.store.segments()):
            flip(self.place, address, offset, bit)

    def look(self, segment: int):
        return self.store.segments(), list(self.store.scan(segment))


def _step(rng: random.Random) -> tuple[str, tuple]:
    segment = rng.randint(1, 2)
    address = Address(segment, rng.choice([0, 1, 2, 500]))
    driver_index = int(rng.random() < 0.15)
    geometry = (GEOMETRY, OTHER_GEOMETRY)[driver_index]
    namespace = rng.choice([NAMESPACE, NAMESPACE, NAMESPACE, OTHER_NAMESPACE])
    page = replace(page_id(rng.choice("ab"), rng.randint(1, 2)), namespace=namespace)
    first = rng.randrange(geometry.slice_count)
    slices = rng.choice([range(geometry.slice_count), range(first, geometry.slice_count)])
    return rng.choices(
        [
            ("write", (driver_index, page, address, slices)),
            ("read", (driver_index, page, address, slices, rng.random() < 0.8)),
            ("damage", (address, rng.randrange(2 * GEOMETRY.slice_bytes), rng.randrange(8))),
            ("create", (segment, namespace, geometry)),
            ("look", (segment,)),
            ("delete", (segment,)),
        ],
        weights=[10, 16, 1, 3, 2, 1],
    )[0]


@pytest.mark.parametrize("seed", range(40))
def test_reference_and_posix_agree(tmp_path, seed):
    module = pytest.importorskip("kvferry.testing.posix_place")
    places = (MemoryPlace(ManualClock()), module.PosixPlace(tmp_path, ManualClock()))
    histories = [History(place) for place in places]
    rng = random.Random(seed)
    for history in histories:
        history.create(1, NAMESPACE, GEOMETRY)
    for number in range(STEP_COUNT):
        name, arguments = _step(rng)
        if name == "damage" and arguments[0].slot == 500:
            continue
        memory, posix = (getattr(history, name)(*arguments) for history in histories)
        assert memory == posix, (number, name, arguments)
    for history in histories:
        history.store.close()
