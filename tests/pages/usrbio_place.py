"""A folder on an emulated 3FS, open beneath every check: a `testing.pages.Place`."""

from kvferry.clock import SystemClock
from kvferry.pages.facts import Asked
from kvferry.pages.usrbio import UsrbioPages
from kvferry.testing.places import ASKED
from kvferry.testing.posix_place import PosixPlace
from tests.emulation.library import Emulation

OPTIONS = {"read_thread_count": 2, "write_thread_count": 2}


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
