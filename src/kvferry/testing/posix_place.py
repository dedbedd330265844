"""The medium of the posix store, open beneath every check: a `testing.pages.Place`."""

import os
from pathlib import Path

from kvferry.clock import Clock
from kvferry.layout import Address, PageGeometry
from kvferry.pages.base import slot_offset_bytes
from kvferry.pages.facts import Asked
from kvferry.pages.file_pages import native_digest
from kvferry.pages.posix import PosixPages
from kvferry.pages.segments import SegmentFiles
from kvferry.testing.places import ASKED


class PosixPlace:
    """A folder whose files can be read and overwritten behind the store's back. `options` go to
    every store."""

    digest = staticmethod(native_digest)

    def __init__(self, root: Path, clock: Clock, **options):
        self.root = root
        self._clock = clock
        self._options = options
        self._files: SegmentFiles | None = None

    def store(self, asked: Asked = ASKED) -> PosixPages:
        return PosixPages(self.root, self._clock, asked, **self._options)

    def page(self, address: Address) -> bytes:
        path, offset, geometry = self._where(address)
        with path.open("rb") as file:
            return os.pread(file.fileno(), geometry.page_bytes, offset)

    def replace_page(self, address: Address, content: bytes) -> None:
        path, offset, geometry = self._where(address)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), content, offset)
            if len(content) < geometry.page_bytes:
                os.ftruncate(file.fileno(), offset + len(content))

    def _where(self, address: Address) -> tuple[Path, int, PageGeometry]:
        if self._files is None:
            self._files = SegmentFiles(self.root, Asked(), self._clock, self.digest)
            self._files.open()
        geometry = self._files.read(address.segment).geometry
        offset = slot_offset_bytes(self._files.facts, geometry, address.slot)
        return self._files.path(address.segment), offset, geometry
