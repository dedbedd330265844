"""What goes through one chunk of the GPU's buffer at once, and what the device has found of it.

The host reads what was found as plain bytes: a batch that is whole costs it one comparison.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that go through one chunk, one after the other, by ascending staging address.

    `indices`: their places in the job. `expected`: 8 bytes for the checksum of each slice; empty if
    nobody wants them. `slip`: see `SliceProver`; it must live until the kernels have run.
    """

    indices: tuple[int, ...]
    addresses: tuple[int, ...]
    block_count: int
    expected: bytes
    slip: Tensor

    @property
    def slice_count(self) -> int:
        return len(self.expected) // 8

    @property
    def block_ids(self) -> Tensor:
        return self.slip[2 * self.slice_count :]

    def found(self) -> list[tuple[int, bytes]]:
        """Checksums of each piece, by its place in the job. Once the batch is done."""
        return list(zip(self.indices, self._by_piece(self._found()), strict=False))

    def failed(self) -> list[int]:
        """Places in the job of pieces that are damaged. Once the batch is done."""
        found = self._found()
        if found == self.expected:
            return []
        pieces = zip(
            self.indices, self._by_piece(found), self._by_piece(self.expected), strict=True
        )
        return [index for index, sums, expected in pieces if sums != expected]

    def _found(self) -> bytes:
        return ctypes.string_at(self.slip.data_ptr(), len(self.expected))

    def _by_piece(self, sums: bytes) -> list[bytes]:
        count = len(sums) // len(self.indices)
        return [sums[start : start + count] for start in range(0, len(sums), count or 1)]
