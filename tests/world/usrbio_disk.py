"""3FS under the simulated world: real segment files, real rings, the emulated library's daemon."""

from kvferry.layout import Address
from kvferry.pages.base import PageStore
from kvferry.pages.facts import Asked
from kvferry.testing.posix_place import PosixPlace
from kvferry.testing.world.checks import SimClock
from tests.emulation.library import Emulation
from tests.pages.usrbio_place import PatientPages

DISORDER = {"reorder": 1, "fewer": 1, "implicit": 0.3, "delay_us": 200, "late_ms": 3}
FAULTS = {"late": 0.1, "eio": 0.04, "eremoteio": 0.04, "eintr": 0.04}


class UsrbioDisk(PosixPlace):
    """A `world.storage.Disk` on one emulated mount."""

    def __init__(self, emulation: Emulation, clock: SimClock):
        super().__init__(emulation.mount / f"store-{clock.random_bytes(4).hex()}", clock)
        self._emulation = emulation
        self._plain: PatientPages | None = None
        self._disturb()

    def make(self, clock: SimClock, asked: Asked) -> PatientPages:
        pages = PatientPages(
            self.root,
            clock,
            asked,
            library=str(self._emulation.path),
            read_thread_count=1,
            write_thread_count=1,
        )
        self._plain = self._plain or pages
        return pages

    def ended(self, pages: PageStore) -> None:
        """The daemon finishes what it has begun."""
        pages.close()

    def addresses(self) -> list[Address]:
        return [
            address
            for facts in self._plain.segments()
            for address in (Address(facts.segment, slot) for slot in range(facts.slot_count))
            if any(self.page(address))
        ]

    def fill(self) -> None:
        self._disturb(enospc=1)

    def free(self) -> None:
        self._disturb()

    def calm(self) -> None:
        self._emulation.configure(seed=1, **DISORDER)

    def _disturb(self, **more: float) -> None:
        self._emulation.configure(seed=1, **DISORDER, **FAULTS, **more)
