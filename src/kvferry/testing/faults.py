"""Page stores that misbehave: a wrapper with seeded faults around any `PageStore`.

Each operation draws at most one fault. What a fault does to bytes is what the world could do, and
the result is what the real store would have said of it; so a caller of this wrapper is entitled
to everything that the contract promises, and to nothing more. `fired` counts, so that a test can
show that its faults happened. With `rates` emptied no new fault begins.
"""

import errno
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from kvferry.clock import Clock
from kvferry.errors import ClosedError, ExhaustedError, UnavailableError
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages.base import (
    Extent,
    FoundPage,
    Outcome,
    Overdue,
    PageStore,
    Result,
    SegmentFacts,
    StoreFacts,
)
from kvferry.pages.buffers import memory_at
from kvferry.testing.clock import Chance


class Fault(Enum):
    """What can go wrong with one operation."""

    SHORT = "short"  # read: only a part arrives
    LATE = "late"  # begins late, or its result comes late
    LOST = "lost"  # happens, but its result never comes: the buffer never returns
    DUPLICATE = "duplicate"  # happens again, a write also after later writes to its slot
    FLIP_RETURNED = "flip_returned"  # read: a bit of a payload flips on its way
    FLIP_STORED = "flip_stored"  # write: a bit flips at rest, unseen
    TORN = "torn"  # write: only a part is stored, unseen
    NO_SPACE = "no_space"  # write, and making a segment
    IO_ERROR = "io_error"  # fails; a write may have happened all the same
    HANG = "hang"  # this operation and all others, until `release`


READ_FAULTS = (
    Fault.SHORT,
    Fault.LATE,
    Fault.LOST,
    Fault.DUPLICATE,
    Fault.FLIP_RETURNED,
    Fault.IO_ERROR,
    Fault.HANG,
)
WRITE_FAULTS = (
    Fault.LATE,
    Fault.LOST,
    Fault.DUPLICATE,
    Fault.FLIP_STORED,
    Fault.TORN,
    Fault.NO_SPACE,
    Fault.IO_ERROR,
    Fault.HANG,
)


class StoredBytes(Protocol):
    """The bytes at rest, beneath every check: `MemoryPlace` and `PosixPlace` have them."""

    def page(self, address: Address) -> bytes: ...

    def replace_page(self, address: Address, content: bytes) -> None: ...


@dataclass
class _Operation:
    """`before`: what was stored when a write began. `result`: kept back for a late delivery."""

    job: int
    index: int
    extent: Extent
    is_write: bool
    fault: Fault | None
    waits_polls: int = 0
    waits_until_s: float = 0.0
    twin_count: int = 1
    before: bytes = b""
    result: Result | None = None


@dataclass
class _Replay:
    """Bytes of a write that will arrive once more."""

    address: Address
    start: int
    content: bytes
    waits_polls: int


class FaultyPages:
    """A `PageStore` around `inner`, which it owns. `rates`: chance of each fault, per operation.

    A late operation waits for 1 to `late_polls_max` polls and for 0 to `late_s_max` of the clock.
    Calls that are not batched wait `hang_s` while the store hangs, then raise UnavailableError.
    """

    def __init__(
        self,
        inner: PageStore,
        stored: StoredBytes,
        clock: Clock,
        chance: Chance,
        rates: Mapping[Fault, float],
        *,
        late_polls_max: int = 5,
        late_s_max: float = 0.0,
        hang_s: float = 30.0,
    ):
        self.inner = inner
        self.rates = dict(rates)
        self.fired: Counter[Fault] = Counter()
        self.is_hanging = False
        self._stored = stored
        self._clock = clock
        self._chance = chance
        self._late_polls_max = late_polls_max
        self._late_s_max = late_s_max
        self._hang_s = hang_s
        self._is_open = False
        self._job = 0
        self._waiting: list[_Operation] = []  # begin later, or are to be delivered later
        self._running: dict[int, _Operation] = {}  # by the inner job
        self._ready: list[Result] = []
        self._replays: list[_Replay] = []

    def open(self) -> StoreFacts:
        self._is_open = True
        return self.inner.open()

    def close(self) -> None:
        self._is_open = False
        self.inner.close()

    def allocate(self, length_bytes: int) -> tuple[int, object] | None:
        return self.inner.allocate(length_bytes)

    def register(self, address: int, length_bytes: int) -> None:
        self.inner.register(address, length_bytes)

    def overdue(self) -> Overdue:
        return self.inner.overdue()

    def hang(self) -> None:
        """Nothing begins and nothing is delivered from here on."""
        self.is_hanging = True

    def release(self) -> None:
        """Ends a hang: what waited goes on."""
        self.is_hanging = False

    def submit_reads(self, extents: Sequence[Extent]) -> int:
        return self._submit(extents, is_write=False)

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        return self._submit(extents, is_write=True)

    def leave_room(self, is_wanted: bool) -> None:
        self.inner.leave_room(is_wanted)

    def poll(self) -> list[Result]:
        if self.is_hanging:
            return []
        self._advance()
        self._collect(self.inner.poll())
        return self._take_ready()

    def wait(self, timeout_s: float) -> list[Result]:
        if self.is_hanging:
            self._clock.sleep(timeout_s)
            return []
        self._advance()
        self._collect(self.inner.wait(0 if self._ready else timeout_s))
        return self._take_ready()

    def create_segment(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        self._pass_if_alive()
        if self._fires(Fault.NO_SPACE):
            raise ExhaustedError("pages.no_space", f"no room for segment {segment}")
        if self._fires(Fault.IO_ERROR):
            raise UnavailableError("pages.io", f"segment {segment} cannot be made")
        self.inner.create_segment(segment, namespace, geometry)

    def delete_segment(self, segment: int) -> None:
        self._pass_if_alive()
        self.inner.delete_segment(segment)

    def has_segment(self, segment: int) -> bool:
        return self.inner.has_segment(segment)

    def segments(self) -> list[SegmentFacts]:
        self._pass_if_alive()
        return self.inner.segments()

    def scan(self, segment: int) -> Iterator[FoundPage]:
        self._pass_if_alive()
        return self.inner.scan(segment)

    def used_bytes(self) -> int:
        self._pass_if_alive()
        return self.inner.used_bytes()

    def _pass_if_alive(self) -> None:
        if self.is_hanging:
            self._clock.sleep(self._hang_s)
            raise UnavailableError("pages.hang", "the page store does not answer")

    def _fires(self, fault: Fault) -> bool:
        fires = self._chance.random() < self.rates.get(fault, 0.0)
        self.fired[fault] += fires
        return fires

    def _submit(self, extents: Sequence[Extent], is_write: bool) -> int:
        if not self._is_open:
            raise ClosedError("pages.closed", "the page store is not open")
        self._job += 1
        faults = WRITE_FAULTS if is_write else READ_FAULTS
        for index, extent in enumerate(extents):
            fault = next((fault for fault in faults if self._fires(fault)), None)
            operation = _Operation(self._job, index, extent, is_write, fault)
            if fault is Fault.HANG:
                self.hang()
            if self.is_hanging or (fault is Fault.LATE and self._chance.random() < 0.5):
                self._put_off(operation)
            else:
                self._begin(operation)
        return self._job

    def _put_off(self, operation: _Operation) -> None:
        operation.waits_polls = self._chance.randint(1, self._late_polls_max)
        wait_s = self._chance.uniform(0, self._late_s_max)
        operation.waits_until_s = self._clock.now_s() + wait_s
        self._waiting.append(operation)

    def _advance(self) -> None:
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation.waits_polls -= 1
            if operation.waits_polls > 0 or self._clock.now_s() < operation.waits_until_s:
                self._waiting.append(operation)
            elif operation.result is not None:
                self._ready.append(operation.result)
            else:
                is_late = operation.fault is Fault.LATE
                self._begin(replace(operation, fault=None) if is_late else operation)
        replays, self._replays = self._replays, []
        for replay in replays:
            replay.waits_polls -= 1
            if replay.waits_polls > 0:
                self._replays.append(replay)
            else:
                self._overwrite(replay.address, replay.start, replay.content)

    def _begin(self, operation: _Operation) -> None:
        refused = self._refusal(operation)
        if refused is not None:
            self._ready.append(refused)
            return
        extent, fault = operation.extent, operation.fault
        if fault is Fault.TORN:
            operation.before = self._extent_bytes(extent)
        operation.twin_count = 2 if fault is Fault.DUPLICATE and not operation.is_write else 1
        self._submit_inner(operation)

    def _submit_inner(self, operation: _Operation) -> None:
        submit = self.inner.submit_writes if operation.is_write else self.inner.submit_reads
        self._running[submit([operation.extent])] = operation

    def _refusal(self, operation: _Operation) -> Result | None:
        """The result of an operation that fails without being tried."""
        job, index, fault = operation.job, operation.index, operation.fault
        if fault is Fault.NO_SPACE:
            return Result(job, index, Outcome.NO_SPACE, errno.ENOSPC)
        if fault is Fault.IO_ERROR and not (operation.is_write and self._chance.random() < 0.5):
            self._spoil(operation)
            return Result(job, index, Outcome.IO_ERROR, errno.EIO)
        if fault is Fault.SHORT:
            self._spoil(operation)
            return Result(job, index, Outcome.SHORT)
        return None

    def _spoil(self, operation: _Operation) -> None:
        if not operation.is_write:
            buffer = _buffer(operation.extent)
            start = self._chance.randrange(len(buffer))
            buffer[start:] = self._chance.randbytes(len(buffer) - start)

    def _collect(self, results: Sequence[Result]) -> None:
        for inner in results:
            operation = self._running.pop(inner.job)
            operation.twin_count -= 1
            result = replace(inner, job=operation.job, index=operation.index)
            if operation.result is None or operation.result.outcome is Outcome.OK:
                operation.result = result
            if operation.twin_count == 0:
                self._deliver(operation, operation.result)
            else:  # one after the other: the buffer is one operation's at a time
                self._submit_inner(operation)

    def _deliver(self, operation: _Operation, result: Result) -> None:
        fault, is_ok = operation.fault, result.outcome is Outcome.OK
        if fault is Fault.LOST:
            return
        if fault is Fault.LATE:
            self._put_off(operation)
            return
        if fault is Fault.IO_ERROR:
            result = Result(result.job, result.index, Outcome.IO_ERROR, errno.EIO)
        elif fault is Fault.FLIP_RETURNED and is_ok:
            result = self._flip_returned(operation.extent, result)
        elif is_ok and operation.is_write:
            self._damage(operation)
        self._ready.append(result)

    def _flip_returned(self, extent: Extent, result: Result) -> Result:
        slice_index = self._chance.randrange(extent.slice_count)
        start = slice_index * extent.geometry.slice_bytes + HEADER_BYTES
        offset = start + self._chance.randrange(extent.geometry.payload_bytes)
        _buffer(extent)[offset] ^= 1 << self._chance.randrange(8)
        return replace(result, outcome=Outcome.CORRUPT) if extent.verify_payload else result

    def _damage(self, operation: _Operation) -> None:
        """What happens to a write after it seemed to be done."""
        extent = operation.extent
        start = extent.first_slice * extent.geometry.slice_bytes
        content = self._extent_bytes(extent)
        if not content:
            return
        offset = self._chance.randrange(len(content))
        if operation.fault is Fault.DUPLICATE:
            wait_polls = self._chance.randint(1, self._late_polls_max)
            self._replays.append(_Replay(extent.address, start, content, wait_polls))
        elif operation.fault is Fault.TORN:
            torn = content[:offset] + operation.before[offset:]
            self._overwrite(extent.address, start, torn)
        elif operation.fault is Fault.FLIP_STORED:
            flipped = bytes([content[offset] ^ 1 << self._chance.randrange(8)])
            self._overwrite(extent.address, start + offset, flipped)

    def _extent_bytes(self, extent: Extent) -> bytes:
        if not self._has(extent.address.segment):
            return b""
        start = extent.first_slice * extent.geometry.slice_bytes
        length_bytes = extent.slice_count * extent.geometry.slice_bytes
        return self._stored.page(extent.address)[start : start + length_bytes]

    def _overwrite(self, address: Address, start: int, content: bytes) -> None:
        if self._has(address.segment):
            page = self._stored.page(address)
            page = page[:start] + content + page[start + len(content) :]
            self._stored.replace_page(address, page)

    def _has(self, segment: int) -> bool:
        return any(found.segment == segment for found in self.inner.segments())

    def _take_ready(self) -> list[Result]:
        ready, self._ready = self._ready, []
        return ready


def _buffer(extent: Extent) -> memoryview:
    return memory_at(extent.buffer_address, extent.slice_count * extent.geometry.slice_bytes)
