"""Copier for CPU tensors: native threads over raw addresses, nothing else."""

from collections.abc import Iterable, Sequence

from kvferry import _native
from kvferry.device.base import Done, Piece
from kvferry.layout import HEADER_BYTES, PageGeometry, Region


class HostCopier:
    """Gathers and scatters one cache group's blocks of one rank. See `base`.

    `regions` in layer order; they must stay valid until `close`. Proves no pages: the threads that
    read them do, while the bytes are in the processor's cache.
    """

    proves_pages = False

    def __init__(self, regions: Sequence[Region], geometry: PageGeometry, thread_count: int):
        self._thread_count = thread_count
        self._map = _native.BlockMap(
            [
                (
                    region.base_address,
                    region.kernel_blocks,
                    region.block_tokens,
                    region.content_bytes,
                    region.block_stride_bytes,
                    region.head_stride_bytes,
                    region.token_stride_bytes,
                )
                for region in regions
            ],
            regions[0].head_count,
            HEADER_BYTES,
            geometry.slice_bytes,
        )
        self._pool: _native.CopyPool | None = None

    def open(self) -> None:
        self._pool = _native.CopyPool(self._thread_count)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def order_gathers(self) -> None:
        """The engine has computed when its thread goes on: nothing to order."""

    def order_scatters(self) -> None:
        """The engine has computed when its thread goes on: nothing to order."""

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        return self._submit(True, pieces)

    def submit_scatter(self, pieces: Sequence[Piece]) -> int:
        if any(piece.checksums is not None for piece in pieces):
            raise ValueError("this copier proves no pages")
        return self._submit(False, pieces)

    def _submit(self, is_gather: bool, pieces: Sequence[Piece]) -> int:
        native_pieces = [(piece.blocks, piece.staging_address) for piece in pieces]
        return self._pool.submit(self._map, is_gather, native_pieces)

    def poll(self) -> list[Done]:
        return [Done(job) for job in self._pool.poll()]

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        return self._pool.finish(list(jobs), timeout_s)
