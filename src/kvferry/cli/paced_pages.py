"""A page store that is watched, and that may be as slow as another disk: for measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.clock import Clock
from kvferry.pages.base import Extent, Outcome, PageStore, Result


class Traffic:
    """One direction. `bytes_per_s`: of the disk to pretend, which does one thing after another;
    None: none. Counts what is under way, and the bytes that have arrived in good order."""

    def __init__(self, clock: Clock, bytes_per_s: float | None):
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = 0.0
        self.pending_count = 0
        self.good_bytes = 0

    def begin(self, length_bytes: int) -> float:
        """When it is due."""
        self.pending_count += 1
        if not self._bytes_per_s:
            return 0.0
        begun_s = max(self._busy_until_s, self._clock.now_s())
        self._busy_until_s = begun_s + length_bytes / self._bytes_per_s
        return self._busy_until_s

    def end(self, length_bytes: int, outcome: Outcome) -> None:
        self.pending_count -= 1
        if outcome is Outcome.OK:
            self.good_bytes += length_bytes


@dataclass(frozen=True, slots=True)
class _Operation:
    traffic: Traffic
    length_bytes: int
    due_s: float


class PacedPages:
    """Has all that `inner` has; threads as for `inner`. `reads` and `writes` may be looked at from
    any thread."""

    def __init__(
        self,
        inner: PageStore,
        clock: Clock,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
    ):
        self._inner = inner
        self._clock = clock
        self.reads = Traffic(clock, read_bytes_per_s)
        self.writes = Traffic(clock, write_bytes_per_s)
        self._under_way: dict[tuple[int, int], _Operation] = {}
        self._held: list[tuple[_Operation, Result]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit_reads(self, extents: Sequence[Extent]) -> int:
        return self._begun(self._inner.submit_reads(extents), extents, self.reads)

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        return self._begun(self._inner.submit_writes(extents), extents, self.writes)

    def poll(self) -> list[Result]:
        return self._release(self._inner.poll())

    def wait(self, timeout_s: float) -> list[Result]:
        """Until the first result is due, too."""
        first_s = min((operation.due_s for operation, _ in self._held), default=math.inf)
        left_s = max(first_s - self._clock.now_s(), 0.0)
        return self._release(self._inner.wait(min(timeout_s, left_s)))

    def _begun(self, job: int, extents: Sequence[Extent], traffic: Traffic) -> int:
        for index, extent in enumerate(extents):
            length_bytes = extent.slice_count * extent.geometry.slice_bytes
            due_s = traffic.begin(length_bytes)
            self._under_way[job, index] = _Operation(traffic, length_bytes, due_s)
        return job

    def _release(self, results: Sequence[Result]) -> list[Result]:
        now_s = self._clock.now_s()
        self._held += [(self._under_way.pop((r.job, r.index)), r) for r in results]
        ready = [pair for pair in self._held if pair[0].due_s <= now_s]
        self._held = [pair for pair in self._held if pair[0].due_s > now_s]
        for operation, result in ready:
            operation.traffic.end(operation.length_bytes, result.outcome)
        return [result for _, result in ready]
