"""The readable copier: plain loops over memory at absolute addresses, and no haste.

A job is done when somebody asks for it: `finish` does what it is asked for, `poll` some of the
rest in seeded order, and those that have seen `POLLS_MAX` polls. So a gather may be as late as the
contract allows, and a caller that lets blocks be overwritten too early is found out.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvferry.device.base import Done, Piece
from kvferry.layout import HEADER_BYTES, PageGeometry, Region
from kvferry.testing.clock import Chance

POLLS_MAX = 4


class ReferenceCopier:
    """A `Copier`. See the module. `chance`: which jobs a poll does; None: all of them, in order.

    `digest`: the checksum of a padded payload, with which it proves pages; None: it does not.
    `is_stuck`: while True nothing is copied, as if its threads were lost. One thread.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        geometry: PageGeometry,
        chance: Chance | None = None,
        digest: Callable[[bytes], int] | None = None,
    ):
        self._regions = tuple(regions)
        self._geometry = geometry
        self._chance = chance
        self._digest = digest
        self.proves_pages = digest is not None
        self._job = 0
        self._waiting: dict[int, tuple[bool, tuple[Piece, ...]]] = {}
        self._polls: Counter[int] = Counter()
        self._done: list[Done] = []
        self.is_stuck = False

    def open(self) -> None:
        pass

    def close(self) -> None:
        self.is_stuck = False
        self.finish(list(self._waiting), 0.0)

    def order_gathers(self) -> None:
        """The engine has computed when its thread goes on: nothing to order."""

    def order_scatters(self) -> None:
        """The engine has computed when its thread goes on: nothing to order."""

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        for piece in pieces:
            if any(block < 0 for block in piece.blocks):
                raise ValueError("a gather needs all of its blocks")
        return self._submit(True, pieces)

    def submit_scatter(self, pieces: Sequence[Piece]) -> int:
        slices = self._regions[0].head_count
        for checksums in (piece.checksums for piece in pieces if piece.checksums is not None):
            if self._digest is None or len(checksums) != slices:
                raise ValueError("no pages are proven here, or not all slices have a checksum")
        return self._submit(False, pieces)

    def poll(self) -> list[Done]:
        if not self.is_stuck:
            for job in self._chosen():
                self._do(job)
        done, self._done = self._done, []
        return done

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        waiting = [job for job in jobs if job in self._waiting]
        if self.is_stuck:
            return not waiting
        for job in waiting:
            self._do(job)
        return True

    def _submit(self, is_gather: bool, pieces: Sequence[Piece]) -> int:
        block_bytes = sum(region.block_head_bytes for region in self._regions)
        for piece in pieces:
            if len(piece.blocks) * block_bytes > self._geometry.padded_payload_bytes:
                raise ValueError("more blocks than a slice has room for")
        self._job += 1
        self._waiting[self._job] = (is_gather, tuple(pieces))
        return self._job

    def _chosen(self) -> list[int]:
        jobs = list(self._waiting)
        if self._chance is None or not jobs:
            return jobs
        self._polls.update(jobs)
        chosen = self._chance.sample(jobs, self._chance.randint(0, len(jobs)))
        due = [job for job in jobs if self._polls[job] >= POLLS_MAX]
        return list(dict.fromkeys(chosen + due))

    def _do(self, job: int) -> None:
        is_gather, pieces = self._waiting.pop(job)
        del self._polls[job]
        if is_gather:
            for piece in pieces:
                self._gather(piece)
            self._done.append(Done(job, checksums=self._gathered_checksums(pieces)))
        else:
            failed = tuple(i for i, piece in enumerate(pieces) if not self._scatter(piece))
            self._done.append(Done(job, failed))

    def _gather(self, piece: Piece) -> None:
        for start in self._payloads(piece):
            ctypes.memset(start, 0, self._geometry.padded_payload_bytes)
        for block_address, page_address, length_bytes in self._runs(piece):
            ctypes.memmove(page_address, block_address, length_bytes)

    def _scatter(self, piece: Piece) -> bool:
        """False if the extent is damaged: then nothing of it is written."""
        if piece.checksums is not None and self._checksums(piece) != piece.checksums:
            return False
        for block_address, page_address, length_bytes in self._runs(piece):
            ctypes.memmove(block_address, page_address, length_bytes)
        return True

    def _gathered_checksums(self, pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
        return tuple(self._checksums(piece) for piece in pieces) if self.proves_pages else ()

    def _checksums(self, piece: Piece) -> tuple[int, ...]:
        length_bytes = self._geometry.padded_payload_bytes
        starts = self._payloads(piece)
        return tuple(self._digest(ctypes.string_at(start, length_bytes)) for start in starts)

    def _payloads(self, piece: Piece) -> Iterator[int]:
        """Where the payload of each slice begins."""
        for head in range(self._regions[0].head_count):
            yield piece.staging_address + head * self._geometry.slice_bytes + HEADER_BYTES

    def _runs(self, piece: Piece) -> Iterator[tuple[int, int, int]]:
        """Address in engine memory, address in the extent, bytes: of all that is not skipped."""
        for head, payload in enumerate(self._payloads(piece)):
            page_address = payload
            for region in self._regions:
                for block in piece.blocks:
                    if block >= 0:
                        yield from block_runs(region, block, head, page_address)
                    page_address += region.block_head_bytes


def block_runs(
    region: Region, block: int, head: int, page_address: int
) -> Iterator[tuple[int, int, int]]:
    """The pieces of one head of one block: address, address in the page, bytes."""
    first = block * region.kernel_blocks
    for kernel_block in range(first, first + region.kernel_blocks):
        address = region.base_address + kernel_block * region.block_stride_bytes
        address += head * region.head_stride_bytes
        for _ in range(region.block_tokens):
            yield address, page_address, region.content_bytes
            address += region.token_stride_bytes
            page_address += region.content_bytes
