"""Pages in preallocated files of any POSIX file system. Bytes bypass the page cache where the file
system lets them (`direct_io`).
"""

import logging
import os
from pathlib import Path
from typing import Literal

from kvferry._native import IoPool
from kvferry.clock import Clock
from kvferry.errors import ConfigError
from kvferry.pages import files, mounts
from kvferry.pages.descriptors import Descriptors
from kvferry.pages.facts import Asked
from kvferry.pages.file_pages import DESCRIPTOR_MAX, FilePages
from kvferry.pages.segments import SUPERBLOCK
from kvferry.pages.threads import read_threads, write_threads

log = logging.getLogger(__name__)


class PosixPages(FilePages):
    """A `PageStore` in a folder. `direct_io` says after `open` whether the page cache is bypassed.
    Threads: None for as many as suit this machine, see `threads`.
    """

    def __init__(
        self,
        root: Path,
        clock: Clock,
        asked: Asked,
        *,
        direct_io: Literal["auto", "on", "off"] = "auto",
        read_thread_count: int | None = None,
        write_thread_count: int | None = None,
        descriptor_max: int = DESCRIPTOR_MAX,
    ):
        super().__init__(root, clock, asked)
        self.direct_io = False
        self._direct_io_wanted = direct_io
        self._read_thread_count = read_thread_count or read_threads()
        self._write_thread_count = write_thread_count
        self._descriptor_max = descriptor_max

    def leave_room(self, is_wanted: bool) -> None:
        """Where threads copy from the page cache, a third of them do. Those that wait for a disk
        take no processor."""
        pool = self._pool
        if pool is not None and not self.direct_io:
            few = max(self._read_thread_count // 3, 2)
            pool.limit_reads(few if is_wanted else self._read_thread_count)

    def _start(self) -> tuple[IoPool, Descriptors]:
        if mounts.is_on_3fs(self._root):
            log.warning("%s is on 3FS: usrbio:// is faster there than posix://", self._root)
        self.direct_io = self._decide_direct_io()
        flags = os.O_RDWR | (os.O_DIRECT if self.direct_io else 0)
        writers = self._write_thread_count or write_threads(is_direct=self.direct_io)
        pool = IoPool(self._read_thread_count, writers)
        return pool, Descriptors(self._segments, flags, self._descriptor_max)

    def _decide_direct_io(self) -> bool:
        if self._direct_io_wanted == "off":
            return False
        with files.system_errors("try direct I/O in", self._root):
            if files.accepts_direct_io(self._root / SUPERBLOCK):
                return True
        if self._direct_io_wanted == "on":
            raise ConfigError(
                "pages.direct_io",
                f"direct_io is on, but the file system of {self._root} has no direct I/O: set "
                "direct_io to auto, or choose another folder",
            )
        log.warning("no direct I/O in %s: pages go through the page cache", self._root)
        return False
