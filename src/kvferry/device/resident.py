"""Copier of GPU memory whose staging is GPU memory as well: one kernel each way, and no copy.

For KV cache that comes from another GPU, or goes there: it lands in staging of the GPU's own.
Everything is in one queue of the device, in the order of submission; the host only asks whether a
mark was passed.
"""

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.device.base import SKIP, Done, Piece
from kvferry.device.gpu import Cuda, Mark
from kvferry.device.kernels import BlockMover
from kvferry.layout import PageGeometry, Region


@dataclass(frozen=True, slots=True)
class _Job:
    """`slips`: block ids that the device reads until `done` was passed."""

    number: int
    slips: tuple[Any, ...]
    done: Mark


class ResidentCopier:
    """Gathers and scatters one cache group's blocks of one rank. See `base`.

    `regions` in layer order; they must stay valid until `close`. Piece addresses are the GPU's.
    """

    proves_pages = False

    def __init__(self, cuda: Cuda, regions: Sequence[Region], geometry: PageGeometry):
        self._cuda = cuda
        self._geometry = geometry
        self._head_count = regions[0].head_count
        self._block_bytes = sum(region.block_head_bytes for region in regions)
        self._mover = BlockMover(regions, geometry, cuda.device)
        self._lock = threading.Lock()
        self._job_count = 0
        self._under_way: deque[_Job] = deque()
        self._engine_marks: dict[bool, Mark] = {}

    def open(self) -> None:
        """Compiles the kernels, which may take a second; they move no block."""
        self._queue = self._cuda.queue()
        for is_gather in (True, False):
            slip = self._cuda.slip(array("q", (SKIP,)))
            self._queue.put(partial(self._mover.move, is_gather, slip, 0, 1))
            self._cuda.wait_for(self._queue.mark())

    def close(self) -> None:
        """Waits on the host for what was submitted. Idempotent."""
        with self._lock:
            while self._under_way:
                self._cuda.wait_for(self._under_way.popleft().done)

    def order_gathers(self) -> None:
        self._engine_marks[True] = self._cuda.engine_queue().mark()

    def order_scatters(self) -> None:
        self._engine_marks[False] = self._cuda.engine_queue().mark()

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        if any(block < 0 for piece in pieces for block in piece.blocks):
            raise ValueError("a gather needs all of its blocks")
        return self._submit(True, pieces)

    def submit_scatter(self, pieces: Sequence[Piece]) -> int:
        if any(piece.checksums is not None for piece in pieces):
            raise ValueError("no pages are proven here")
        return self._submit(False, pieces)

    def poll(self) -> list[Done]:
        done = []
        with self._lock:
            while self._under_way and self._cuda.has_passed(self._under_way[0].done):
                done.append(Done(self._under_way.popleft().number))
        return done

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        """Never waits on the host, so `timeout_s` does not matter."""
        wanted = set(jobs)
        with self._lock:
            last = next((job for job in reversed(self._under_way) if job.number in wanted), None)
            if last is not None:
                self._cuda.engine_queue().wait(last.done)
        return True

    def _submit(self, is_gather: bool, pieces: Sequence[Piece]) -> int:
        if any(self._fill_bytes(piece) > self._geometry.padded_payload_bytes for piece in pieces):
            raise ValueError("more blocks than a slice has room for")
        with self._lock:
            engine_mark = self._engine_marks.get(is_gather)
            if engine_mark is not None:
                self._queue.wait(engine_mark)
            slips: list[Any] = []
            try:
                for piece in pieces:
                    slips.append(self._cuda.slip(array("q", piece.blocks)))
                    self._put(is_gather, piece, slips[-1])
            except BaseException:  # the caller will give the blocks to others
                self._cuda.wait_for(self._queue.mark())
                raise
            self._job_count += 1
            self._under_way.append(_Job(self._job_count, tuple(slips), self._queue.mark()))
            return self._job_count

    def _put(self, is_gather: bool, piece: Piece, slip: Any) -> None:
        if is_gather and self._fill_bytes(piece) < self._geometry.padded_payload_bytes:
            extent_bytes = self._head_count * self._geometry.slice_bytes
            self._queue.put(partial(self._cuda.zero, piece.staging_address, extent_bytes))
        self._queue.put(
            partial(self._mover.move, is_gather, slip, piece.staging_address, len(piece.blocks))
        )

    def _fill_bytes(self, piece: Piece) -> int:
        """Of each slice."""
        return len(piece.blocks) * self._block_bytes
