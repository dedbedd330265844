"""Memory at known addresses, and a driver that moves one extent at a time and waits for it."""

import ctypes
import hashlib
import mmap
from dataclasses import dataclass, replace

from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages.base import Extent, PageId, PageStore, Result
from kvferry.pages.buffers import memory_at


class Buffer:
    """Page-aligned memory, freed with the last reference to it: `allocated`, or anonymous."""

    def __init__(self, length_bytes: int, allocated: tuple[int, object] | None = None):
        if allocated is None:
            memory = mmap.mmap(-1, length_bytes)
            allocated = ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory
        self.address, self._keeper = allocated
        self.view = memory_at(self.address, length_bytes)
        self.length_bytes = length_bytes


def page_id(name: str, generation: int = 0, namespace: bytes = b"n" * 32, index: int = 0) -> PageId:
    """A page that tests can tell from others: digests made of `name`."""
    key = hashlib.sha256(name.encode()).digest()
    parent = hashlib.sha256(b"parent of " + key).digest()
    return PageId(namespace, key, parent, index, 7, generation.to_bytes(16, "big"), b"t" * 16)


def payload(page: PageId, geometry: PageGeometry, slice_index: int) -> bytes:
    """The bytes of one slice: a function of key, generation and slice index."""
    seed = page.key + page.generation + slice_index.to_bytes(4, "big")
    return hashlib.shake_128(seed).digest(geometry.payload_bytes)


@dataclass(frozen=True)
class Read:
    """What a read came to: `payloads` are those in the buffer, whatever the outcome."""

    result: Result
    payloads: tuple[bytes, ...]


class Driver:
    """Writes and reads single extents of one geometry through one store, which it registers its
    buffer with. Waits at most 10 s for a result."""

    def __init__(self, store: PageStore, geometry: PageGeometry, page_count: int = 4):
        self.store = store
        self.geometry = geometry
        length_bytes = page_count * geometry.page_bytes
        self.buffer = Buffer(length_bytes, store.allocate(length_bytes))
        store.register(self.buffer.address, self.buffer.length_bytes)

    def extent(
        self, page: PageId, address: Address, slices: range | None = None, position: int = 0
    ) -> Extent:
        """An extent whose buffer is the one of page `position`."""
        slices = slices or range(self.geometry.slice_count)
        target = self.buffer.address + position * self.geometry.page_bytes
        return Extent(page, self.geometry, address, slices.start, len(slices), target)

    def fill(self, extent: Extent) -> None:
        """Puts the payloads of an extent into its buffer, and garbage where headers will be."""
        for slice_index, start in self._places(extent):
            content = payload(extent.page, self.geometry, slice_index)
            padded = content.ljust(self.geometry.padded_payload_bytes, b"\0")
            end = start + self.geometry.slice_bytes
            self.buffer.view[start:end] = b"\xaa" * HEADER_BYTES + padded

    def spoil(self, extent: Extent) -> None:
        """Fills the buffer of an extent with what no page has."""
        for _, start in self._places(extent):
            self.buffer.view[start : start + self.geometry.slice_bytes] = (
                b"\xee" * self.geometry.slice_bytes
            )

    def payloads(self, extent: Extent) -> tuple[bytes, ...]:
        """The payloads in the buffer of an extent."""
        starts = [start + HEADER_BYTES for _, start in self._places(extent)]
        return tuple(bytes(self.buffer.view[s : s + self.geometry.payload_bytes]) for s in starts)

    def expected(self, extent: Extent) -> tuple[bytes, ...]:
        """The payloads that an extent should have."""
        return tuple(payload(extent.page, self.geometry, i) for i, _ in self._places(extent))

    def write(self, page: PageId, address: Address, slices: range | None = None) -> Result:
        extent = self.extent(page, address, slices)
        self.fill(extent)
        return self.one_result(self.store.submit_writes([extent]))

    def read(
        self,
        page: PageId,
        address: Address,
        slices: range | None = None,
        verify_payload: bool = True,
    ) -> Read:
        extent = replace(self.extent(page, address, slices), verify_payload=verify_payload)
        self.spoil(extent)
        result = self.one_result(self.store.submit_reads([extent]))
        return Read(result, self.payloads(extent))

    def one_result(self, job: int) -> Result:
        (result,) = self.results(1)
        assert (result.job, result.index) == (job, 0)
        return result

    def results(self, count: int) -> list[Result]:
        """The next `count` results, by job and index."""
        found: list[Result] = []
        for _ in range(200):
            if len(found) < count:
                found += self.store.wait(0.05)
        assert len(found) == count, f"{len(found)} results of {count}"
        return sorted(found, key=lambda result: (result.job, result.index))

    def _places(self, extent: Extent) -> list[tuple[int, int]]:
        """Slice index and start in the buffer of each slice of an extent."""
        first = extent.buffer_address - self.buffer.address
        return [
            (extent.first_slice + position, first + position * self.geometry.slice_bytes)
            for position in range(extent.slice_count)
        ]
