"""Open segment files: few, checked, and open for as long as an operation needs them."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.pages.base import Outcome, SegmentFacts
from kvferry.pages.segments import SegmentFiles


@dataclass(eq=False)
class OpenFile:
    """A segment file. `use_count`: operations that were given its descriptor and not returned."""

    descriptor: int
    facts: SegmentFacts
    inode: tuple[int, int]
    use_count: int = 0
    is_cached: bool = True


class Descriptors:
    """A cache of at most `descriptor_max` open files, and those in use beyond that. Any thread.

    A segment may be deleted, and its number used again, by another process at any time: `take`
    looks whether the name still means the file that is open. `opened` and `closing` are called with
    each descriptor, right after and before; `opened` may raise OSError.
    """

    def __init__(
        self,
        segments: SegmentFiles,
        flags: int,
        descriptor_max: int,
        opened: Callable[[int], None] = lambda _: None,
        closing: Callable[[int], None] = lambda _: None,
    ):
        self._segments = segments
        self._opened = opened
        self._closing = closing
        self._flags = flags
        self._descriptor_max = descriptor_max
        self._files: dict[int, OpenFile] = {}  # the last one was used last
        self._lock = threading.Lock()

    def take(self, segment: int) -> OpenFile | Outcome:
        """The file of a segment with one more use, or why there is none. Raises OSError."""
        with self._lock:
            file = self._files.get(segment)
            if file is not None and file.inode != self._inode_now(segment):
                self._drop(self._files.pop(segment))
                file = None
            if file is None:
                file = self._open(segment)
                if isinstance(file, Outcome):
                    return file
            self._files.pop(segment, None)
            self._files[segment] = file
            file.use_count += 1
            while len(self._files) > self._descriptor_max:
                self._drop(self._files.pop(next(iter(self._files))))
            return file

    def give_back(self, file: OpenFile) -> None:
        """Ends one use."""
        with self._lock:
            file.use_count -= 1
            self._close_unused(file)

    def forget(self, segment: int) -> None:
        """The segment is gone."""
        with self._lock:
            file = self._files.pop(segment, None)
            if file is not None:
                self._drop(file)

    def close(self) -> None:
        """Closes what is not in use. What hangs keeps its descriptor, so that the number cannot
        come to mean another file under it."""
        for segment in list(self._files):
            self.forget(segment)

    def _open(self, segment: int) -> OpenFile | Outcome:
        found = self._segments.open_file(segment, self._flags)
        if isinstance(found, Outcome):
            return found
        descriptor, facts = found
        try:
            status = os.fstat(descriptor)
            self._opened(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return OpenFile(descriptor, facts, (status.st_dev, status.st_ino))

    def _inode_now(self, segment: int) -> tuple[int, int] | None:
        try:
            status = os.stat(self._segments.path(segment))
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _drop(self, file: OpenFile) -> None:
        file.is_cached = False
        self._close_unused(file)

    def _close_unused(self, file: OpenFile) -> None:
        if file.use_count == 0 and not file.is_cached:
            self._closing(file.descriptor)
            os.close(file.descriptor)
