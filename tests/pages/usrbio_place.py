"""A folder on an emulated 3FS, open beneath every check: a `testing.pages.Place`."""

from kvferry.clock import SystemClock
from kvferry.pages.base import Result
from kvferry.pages.facts import Asked
from kvferry.pages.usrbio import UsrbioPages
from kvferry.testing.clock import ManualClock
from kvferry.testing.places import ASKED
from kvferry.testing.posix_place import PosixPlace
from tests.emulation.library import Emulation

OPTIONS = {"read_thread_count": 2, "write_thread_count": 2}
PATIENCE_COUNT = 200


class UsrbioPlace(PosixPlace):
    """`options` go to every store."""

    def __init__(self, emulation: Emulation, **options):
        super().__init__(emulation.mount / "store", SystemClock())
        self._library = str(emulation.path)
        self._own_options = {**OPTIONS, **options}

    def store(self, asked: Asked = ASKED) -> UsrbioPages:
        return UsrbioPages(
            self.root, self._clock, asked, library=self._library, **self._own_options
        )


class PatientPages(UsrbioPages):
    """A poll returns all that was submitted: real threads know no manual clock."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._out_count = 0

    def submit_reads(self, extents):
        self._out_count += len(extents)
        return super().submit_reads(extents)

    def submit_writes(self, extents):
        self._out_count += len(extents)
        return super().submit_writes(extents)

    def poll(self) -> list[Result]:
        found: list[Result] = []
        for _ in range(PATIENCE_COUNT):
            if len(found) < self._out_count:
                found += super().wait(0.05)
        assert len(found) == self._out_count, "I/Os without a completion"
        self._out_count = 0
        return sorted(found, key=lambda result: (result.job, result.index))

    def wait(self, timeout_s: float) -> list[Result]:
        found = self.poll()
        if not found:
            self._clock.sleep(timeout_s)
        return found


class PatientPlace(UsrbioPlace):
    """`name`: of its folder on the mount."""

    def __init__(self, emulation: Emulation, clock: ManualClock, name: str):
        super().__init__(emulation)
        self._clock = clock
        self.root = emulation.mount / name

    def store(self, asked: Asked = ASKED) -> PatientPages:
        return PatientPages(
            self.root, self._clock, asked, library=self._library, **self._own_options
        )
