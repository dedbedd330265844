"""Pages in segment files, moved by native threads: what all backends over files have in common.

Submitting costs some Python and, for each segment of the batch, one `stat`; opening a segment for
the first time reads its header. Everything else happens in native threads, without the GIL.
"""

import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry._native import checksum
from kvferry.clock import Clock
from kvferry.errors import ClosedError
from kvferry.layout import PageGeometry
from kvferry.pages import files, header
from kvferry.pages.base import (
    Extent,
    FoundPage,
    Outcome,
    Overdue,
    Result,
    SegmentFacts,
    StoreFacts,
    refusal,
    slot_offset_bytes,
)
from kvferry.pages.buffers import Registered
from kvferry.pages.descriptors import Descriptors, OpenFile
from kvferry.pages.facts import Asked
from kvferry.pages.segments import SegmentFiles

log = logging.getLogger(__name__)

_OUTCOMES = tuple(Outcome)  # the pool's codes are positions in this
_CLOSE_TIMEOUT_S = 5.0
DESCRIPTOR_MAX = 256

NativeResult = tuple[int, int, int, int, tuple[int, ...]]


class Pool(Protocol):
    """What moves the bytes: `_native.IoPool`, `_native.UsrbioPool`."""

    def submit_reads(self, operations: Sequence[tuple], verify_payload: bool) -> int: ...

    def submit_writes(
        self, operations: Sequence[tuple], checksums: Sequence[int] | None
    ) -> int: ...

    def poll(self) -> list[NativeResult]: ...

    def wait(self, timeout_s: float) -> list[NativeResult]: ...

    def close(self, timeout_s: float) -> bool: ...


@dataclass
class _Batch:
    """Operations that went to the pool together. `indices`: theirs in the caller's batch."""

    job: int
    indices: list[int]
    files: list[OpenFile]
    left_count: int = 0


class FilePages:
    """A `PageStore` in a folder. A subclass says in `_start` what moves the bytes.

    `submit_*`, `poll` and `wait` belong to one thread, as the contract says.
    """

    def __init__(self, root: Path, clock: Clock, asked: Asked, *, is_sparse: bool = False):
        self._root = root
        self._segments = SegmentFiles(root, asked, clock, native_digest, is_sparse=is_sparse)
        self._registered = Registered()
        self._pool: Pool | None = None
        self._descriptors: Descriptors | None = None
        self._batches: dict[int, _Batch] = {}  # by the pool's job number
        self._refused: list[Result] = []
        self._job = 0

    def open(self) -> StoreFacts:
        if self._pool is None:
            self._segments.open()
            self._pool, self._descriptors = self._start()
        return self._segments.facts

    def close(self) -> None:
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        is_quiet = pool.close(_CLOSE_TIMEOUT_S)
        if is_quiet:
            for batch in self._batches.values():
                self._give_back(batch)
        else:
            log.error("I/O in %s hangs: its threads and files are left behind", self._root)
        self._descriptors.close()
        self._stop(is_quiet)

    def allocate(self, length_bytes: int) -> tuple[int, object] | None:
        return None

    def register(self, address: int, length_bytes: int) -> None:
        self._registered.add(address, length_bytes)

    def submit_reads(self, extents: Sequence[Extent]) -> int:
        pool = self._begin(extents)
        for verify_payload in (True, False):
            indices = [i for i, e in enumerate(extents) if e.verify_payload is verify_payload]
            batch, operations = self._prepare(extents, indices)
            if operations:
                self._batches[pool.submit_reads(operations, verify_payload)] = batch
        return self._job

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        pool = self._begin(extents)
        for is_known in (True, False):
            indices = [i for i, e in enumerate(extents) if (e.checksums is not None) is is_known]
            batch, operations = self._prepare(extents, indices)
            if operations:
                known = [c for i in batch.indices for c in extents[i].checksums or ()]
                self._batches[pool.submit_writes(operations, known if is_known else None)] = batch
        return self._job

    def poll(self) -> list[Result]:
        return self._results(self._open_pool().poll())

    def wait(self, timeout_s: float) -> list[Result]:
        return self._results(self._open_pool().wait(0 if self._refused else timeout_s))

    def overdue(self) -> Overdue:
        """None: the system answers, sooner or later."""
        return Overdue()

    def create_segment(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        self._open_pool()
        self._segments.create(segment, namespace, geometry)

    def delete_segment(self, segment: int) -> None:
        self._open_pool()
        self._segments.delete(segment)
        self._descriptors.forget(segment)

    def segments(self) -> list[SegmentFacts]:
        self._open_pool()
        return self._segments.all_facts()

    def scan(self, segment: int) -> Iterator[FoundPage]:
        self._open_pool()
        return self._segments.scan(segment)

    def used_bytes(self) -> int:
        self._open_pool()
        return self._segments.used_bytes()

    def has_segment(self, segment: int) -> bool:
        return self._segments.has(segment)

    def available_bytes(self) -> int:
        """What the file system still has for this user. Raises UnavailableError."""
        with files.system_errors("measure", self._root):
            status = os.statvfs(self._root)
            return status.f_bavail * status.f_frsize

    def _start(self) -> tuple[Pool, Descriptors]:
        raise NotImplementedError

    def _stop(self, is_quiet: bool) -> None:
        """After the pool and the files were closed. `is_quiet`: no I/O is left behind."""

    def _open_pool(self) -> Pool:
        if self._pool is None:
            raise ClosedError("pages.closed", f"the page store {self._root} is not open")
        return self._pool

    def _begin(self, extents: Sequence[Extent]) -> Pool:
        pool = self._open_pool()
        self._registered.check(extents)
        self._job += 1
        return pool

    def _prepare(
        self, extents: Sequence[Extent], indices: Sequence[int]
    ) -> tuple[_Batch, list[tuple]]:
        """The operations that can be tried; the others have their results."""
        segments = dict.fromkeys(extents[index].address.segment for index in indices)
        taken = {segment: self._take(segment) for segment in segments}
        batch = _Batch(self._job, [], [f for f in taken.values() if isinstance(f, OpenFile)])
        operations = []
        for index in indices:
            extent = extents[index]
            file = taken[extent.address.segment]
            if isinstance(file, OpenFile):
                outcome, error_number = refusal(file.facts, extent), 0
            else:
                outcome, error_number = file
            if outcome is None:
                batch.indices.append(index)
                operations.append(self._operation(extent, file))
            else:
                self._refused.append(Result(self._job, index, outcome, error_number))
        batch.left_count = len(operations)
        if not operations:
            self._give_back(batch)
        return batch, operations

    def _take(self, segment: int) -> OpenFile | tuple[Outcome, int]:
        try:
            file = self._descriptors.take(segment)
        except OSError as error:
            return Outcome.IO_ERROR, error.errno or 0
        return file if isinstance(file, OpenFile) else (file, 0)

    def _operation(self, extent: Extent, file: OpenFile) -> tuple:
        geometry = extent.geometry
        slice_bytes = geometry.slice_bytes
        slot_offset = slot_offset_bytes(self._segments.facts, geometry, extent.address.slot)
        return (
            file.descriptor,
            slot_offset + extent.first_slice * slice_bytes,
            extent.buffer_address,
            extent.first_slice,
            extent.slice_count,
            slice_bytes,
            geometry.payload_bytes,
            header.template(extent.page, geometry),
        )

    def _results(self, native: list[NativeResult]) -> list[Result]:
        results, self._refused = self._refused, []
        for number, position, code, error_number, checksums in native:
            batch = self._batches[number]
            index = batch.indices[position]
            results.append(Result(batch.job, index, _OUTCOMES[code], error_number, checksums))
            batch.left_count -= 1
            if batch.left_count == 0:
                self._give_back(self._batches.pop(number))
        return results

    def _give_back(self, batch: _Batch) -> None:
        for file in batch.files:
            self._descriptors.give_back(file)


def native_digest(data: bytes | bytearray | memoryview) -> int:
    """The checksum of the format, at memory speed."""
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    return checksum(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
