"""The readable page store: the same bytes as on a disk, in a dict of segments.

It is the model in tests and takes part in the simulated world: no threads and no native code.
Every operation happens, and its result is delivered, in the `poll` after its submission, reads
before writes; so a caller that touches a buffer too early is found out. Several stores over one
`Medium` are several processes over one file system.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.clock import Clock
from kvferry.errors import ClosedError, ExhaustedError, IncompatibleError
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages import header
from kvferry.pages.base import (
    Extent,
    FoundPage,
    Outcome,
    Overdue,
    Result,
    SegmentFacts,
    StoreFacts,
    refusal,
)
from kvferry.pages.buffers import Registered, memory_at
from kvferry.pages.facts import Asked, decide, require_agreement, segment_facts


@dataclass
class Segment:
    """`slots` holds the bytes of pages; one that was never written is a hole and reads as zeros.
    One that is shorter than a page was cut off."""

    facts: SegmentFacts
    slots: dict[int, bytearray] = field(default_factory=dict)


@dataclass
class Medium:
    """What outlives a store. `room_bytes`: how much fits; None: as much as one likes."""

    room_bytes: int | None = None
    facts: StoreFacts | None = None
    segments: dict[int, Segment] = field(default_factory=dict)


def digest(data: bytes | bytearray | memoryview) -> int:
    """Stands in for the checksum of the format: as good at finding damage, fast in Python."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class MemoryPages:
    """A `PageStore`. `digest`: pass the native checksum where a caller computes checksums itself.
    All methods belong to one thread."""

    def __init__(
        self,
        medium: Medium,
        clock: Clock,
        asked: Asked,
        *,
        digest: header.Digest = digest,
    ):
        self._medium = medium
        self._clock = clock
        self._asked = asked
        self._digest = digest
        self._registered = Registered()
        self._reads: list[tuple[int, int, Extent]] = []
        self._writes: list[tuple[int, int, Extent]] = []
        self._job = 0
        self._is_open = False

    def open(self) -> StoreFacts:
        if self._medium.facts is None:
            self._medium.facts = decide(self._asked, self._clock.random_bytes(16))
        require_agreement(self._medium.facts, self._asked, "memory:")
        self._is_open = True
        return self._medium.facts

    def close(self) -> None:
        if self._is_open:
            self.poll()
            self._is_open = False

    def allocate(self, length_bytes: int) -> tuple[int, object] | None:
        return None

    def register(self, address: int, length_bytes: int) -> None:
        self._registered.add(address, length_bytes)

    def submit_reads(self, extents: Sequence[Extent]) -> int:
        return self._submit(self._reads, extents)

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        return self._submit(self._writes, extents)

    def leave_room(self, is_wanted: bool) -> None:
        """It takes no thread of its own."""

    def poll(self) -> list[Result]:
        self._require_open()
        results = [self._read(*operation) for operation in self._reads]
        results += [self._write(*operation) for operation in self._writes]
        self._reads.clear()
        self._writes.clear()
        return results

    def wait(self, timeout_s: float) -> list[Result]:
        results = self.poll()
        if not results:
            self._clock.sleep(timeout_s)
        return results

    def overdue(self) -> Overdue:
        return Overdue()

    def create_segment(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        self._require_open()
        facts = segment_facts(self._medium.facts, segment, namespace, geometry)
        if segment in self._medium.segments:
            if self._medium.segments[segment].facts != facts:
                raise IncompatibleError("pages.segment", f"segment {segment} is of another kind")
            return
        room_bytes = self._medium.room_bytes
        wanted_bytes = self.used_bytes() + self._medium.facts.segment_bytes
        if room_bytes is not None and wanted_bytes > room_bytes:
            raise ExhaustedError("pages.no_space", f"no room for segment {segment}")
        self._medium.segments[segment] = Segment(facts)

    def delete_segment(self, segment: int) -> None:
        self._require_open()
        self._medium.segments.pop(segment, None)

    def segments(self) -> list[SegmentFacts]:
        self._require_open()
        return [found.facts for _, found in sorted(self._medium.segments.items())]

    def scan(self, segment: int) -> Iterator[FoundPage]:
        self._require_open()
        found = self._medium.segments.get(segment)
        if found is None:
            return
        geometry = found.facts.geometry
        for slot, stored in sorted(found.slots.items()):
            blocks = (
                bytes(stored[start : start + HEADER_BYTES]).ljust(HEADER_BYTES, b"\0")
                for start in range(0, geometry.page_bytes, geometry.slice_bytes)
            )
            page = header.page_of(blocks, found.facts, self._digest)
            if page is not None:
                yield FoundPage(page, Address(segment, slot))

    def used_bytes(self) -> int:
        self._require_open()
        return len(self._medium.segments) * self._medium.facts.segment_bytes

    def has_segment(self, segment: int) -> bool:
        return segment in self._medium.segments

    def available_bytes(self) -> int:
        room_bytes = self._medium.room_bytes
        return (1 << 60 if room_bytes is None else room_bytes) - self.used_bytes()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("pages.closed", "the page store is not open")

    def _submit(self, queue: list[tuple[int, int, Extent]], extents: Sequence[Extent]) -> int:
        self._require_open()
        self._registered.check(extents)
        self._job += 1
        queue.extend((self._job, index, extent) for index, extent in enumerate(extents))
        return self._job

    def _segment_for(self, extent: Extent) -> Segment | Outcome:
        segment = self._medium.segments.get(extent.address.segment)
        return refusal(segment and segment.facts, extent) or segment

    def _read(self, job: int, index: int, extent: Extent) -> Result:
        segment = self._segment_for(extent)
        if isinstance(segment, Outcome):
            return Result(job, index, segment)
        buffer = _buffer(extent)
        page = segment.slots.get(extent.address.slot, bytes(extent.geometry.page_bytes))
        start = extent.first_slice * extent.geometry.slice_bytes
        stored = page[start : start + len(buffer)]
        buffer[: len(stored)] = stored
        if len(stored) < len(buffer):
            return Result(job, index, Outcome.SHORT)
        checksums = []
        for slice_index, block, payload in _slices(extent, buffer):
            found = header.verify(block, extent.page, extent.geometry, slice_index, self._digest)
            if isinstance(found, Outcome):
                return Result(job, index, found)
            if extent.verify_payload and self._digest(payload) != found.payload_checksum:
                return Result(job, index, Outcome.CORRUPT)
            checksums.append(found.payload_checksum)
        return Result(job, index, Outcome.OK, checksums=tuple(checksums))

    def _write(self, job: int, index: int, extent: Extent) -> Result:
        segment = self._segment_for(extent)
        if isinstance(segment, Outcome):
            return Result(job, index, segment)
        buffer = _buffer(extent)
        slices = list(_slices(extent, buffer))
        checksums = extent.checksums or tuple(self._digest(payload) for _, _, payload in slices)
        for (slice_index, block, _), checksum in zip(slices, checksums, strict=True):
            block[:] = header.pack(
                extent.page, extent.geometry, slice_index, checksum, self._digest
            )
        page = segment.slots.setdefault(extent.address.slot, bytearray())
        page.extend(bytes(extent.geometry.page_bytes - len(page)))
        start = extent.first_slice * extent.geometry.slice_bytes
        page[start : start + len(buffer)] = buffer
        return Result(job, index, Outcome.OK, checksums=checksums)


def _buffer(extent: Extent) -> memoryview:
    return memory_at(extent.buffer_address, extent.slice_count * extent.geometry.slice_bytes)


def _slices(extent: Extent, buffer: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Slice index, header block and padded payload of each slice in a buffer."""
    slice_bytes = extent.geometry.slice_bytes
    for position in range(extent.slice_count):
        part = buffer[position * slice_bytes : (position + 1) * slice_bytes]
        yield extent.first_slice + position, part[:HEADER_BYTES], part[HEADER_BYTES:]
