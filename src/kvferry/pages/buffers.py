"""Memory that operations may name: registered ranges, and a view of an absolute address."""

import ctypes
from collections.abc import Sequence

from kvferry.pages.base import Extent


def memory_at(address: int, length_bytes: int) -> memoryview:
    """The memory at an absolute address, writable. The caller keeps it alive."""
    return memoryview((ctypes.c_char * length_bytes).from_address(address)).cast("B")


class Registered:
    """The ranges that were registered with a store. Any thread may call it."""

    def __init__(self):
        self._ranges: tuple[tuple[int, int], ...] = ()

    def add(self, address: int, length_bytes: int) -> None:
        self._ranges = (*self._ranges, (address, address + length_bytes))

    def check(self, extents: Sequence[Extent]) -> None:
        """Asserts that an extent is one of its page, aligned, and in one registered range."""
        for extent in extents:
            start = extent.buffer_address
            end = start + extent.slice_count * extent.geometry.slice_bytes
            assert start % 4096 == 0, extent
            assert any(low <= start and end <= high for low, high in self._ranges), extent
            last = extent.first_slice + extent.slice_count
            assert 0 <= extent.first_slice < last <= extent.geometry.slice_count, extent
