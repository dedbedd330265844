"""3FS under the simulated world: real segment files, real rings, the emulated library's daemon."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.layout import Address
from kvferry.pages.base import PageStore
from kvferry.pages.facts import Asked
from kvferry.testing.posix_place import PosixPlace
from kvferry.testing.world.checks import SimClock
from tests.emulation.library import Emulation
from tests.pages.usrbio_place import PatientPages

DISORDER = {"reorder": 1, "fewer": 1, "implicit": 0.3, "delay_us": 200, "late_ms": 3}
FAULTS = {"late": 0.1, "eio": 0.03, "eremoteio": 0.03, "eintr": 0.03}


class StartingPages(PatientPages):
    """Starts while the daemon makes no errors: three in a row, and an engine does not start."""

    def __init__(self, disk: "UsrbioDisk", *arguments, **options):
        super().__init__(*arguments, **options)
        self._disk = disk

    def open(self):
        with self._disk.without_errors():
            return super().open()


class UsrbioDisk(PosixPlace):
    """A `world.storage.Disk` on one emulated mount."""

    def __init__(self, emulation: Emulation, clock: SimClock):
        super().__init__(emulation.mount / f"store-{clock.random_bytes(4).hex()}", clock)
        self._emulation = emulation
        self._plain: StartingPages | None = None
        self._disturb()

    def make(self, clock: SimClock, asked: Asked) -> StartingPages:
        pages = StartingPages(
            self,
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
        self._configure()

    @contextmanager
    def without_errors(self) -> Iterator[None]:
        before = self._settings
        self._configure()
        yield
        self._configure(**before)

    def _disturb(self, **more: float) -> None:
        self._configure(**FAULTS, **more)

    def _configure(self, **settings: float) -> None:
        self._settings = settings
        seed = int.from_bytes(self._clock.random_bytes(2), "big")
        self._emulation.configure(seed=seed, **DISORDER, **settings)
