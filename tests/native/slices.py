"""A small page and the operations on it: what the I/O pool writes and reads in tests."""

import dataclasses
import os

from kvferry import _native
from kvferry.layout import PageGeometry
from kvferry.pages import header
from kvferry.pages.base import Outcome, PageId

from .buffers import Buffer

GEOMETRY = PageGeometry(slice_count=3, payload_bytes=4000, chunk_tokens=16)
SLICE_BYTES = GEOMETRY.slice_bytes
PAGE = PageId(
    namespace=bytes([1]) * 32,
    key=bytes([2]) * 32,
    parent=bytes([3]) * 32,
    chunk_index=4,
    group=5,
    generation=bytes([6]) * 16,
    tenant=bytes([7]) * 16,
)
TEMPLATE = header.template(PAGE, GEOMETRY)
DEADLINE_S = 20.0
OUTCOMES = list(Outcome)
_held: list[Buffer] = []  # the pool's threads may be in any of them


def native_checksum(data) -> int:
    """As `pages.header` wants a digest."""
    buffer = Buffer.of(data)
    return _native.checksum(buffer.address, len(data))


def payloads(count: int = GEOMETRY.slice_count) -> Buffer:
    """An extent whose payloads are filled and whose headers are not."""
    buffer = Buffer(count * SLICE_BYTES)
    for i in range(count):
        start = i * SLICE_BYTES + 4096
        buffer.view[start : start + 4000] = bytes([i + 1, 99, 7, 0]) * 1000
    return buffer


def operation(
    descriptor: int,
    buffer: Buffer,
    *,
    offset_bytes: int = 0,
    first_slice: int = 0,
    template: bytes = TEMPLATE,
    payload_bytes: int = GEOMETRY.payload_bytes,
) -> tuple:
    _held.append(buffer)
    count = len(buffer.view) // SLICE_BYTES
    return (
        descriptor,
        offset_bytes,
        buffer.address,
        first_slice,
        count,
        SLICE_BYTES,
        payload_bytes,
        template,
    )


def collect(pool, count: int) -> list:
    """So many results, by job and index: (outcome, errno, checksums)."""
    results = []
    while len(results) < count:
        arrived = pool.wait(DEADLINE_S)
        assert arrived, f"{len(results)} of {count} results within {DEADLINE_S} s"
        results += arrived
    assert pool.poll() == []
    return [(OUTCOMES[code], errno, sums) for _, _, code, errno, sums in sorted(results)]


def write(pool, *operations: tuple, checksums=None) -> list:
    pool.submit_writes(operations, checksums)
    return collect(pool, len(operations))


def read(pool, *operations: tuple, verify_payload: bool = True) -> list:
    pool.submit_reads(operations, verify_payload)
    return collect(pool, len(operations))


def outcome(pool, descriptor: int, slice_count: int = GEOMETRY.slice_count, **asked) -> Outcome:
    """What a read of the extent says."""
    return read(pool, operation(descriptor, Buffer(slice_count * SLICE_BYTES), **asked))[0][0]


def asking(**fields) -> bytes:
    """The template of another page."""
    return header.template(dataclasses.replace(PAGE, **fields), GEOMETRY)


def new_file() -> int:
    return os.memfd_create("extent")
