"""The header in front of every slice: what makes a page prove itself (docs/formats.md).

This is the readable form. The native I/O pool does the same on the data path, with the template
made here; the conformance suite holds the two against each other. `Digest` is the checksum used:
`checksum.checksum_reference` is the format's own and slow (about 0.3 ms for 4 KiB), the native one
is the same function at memory speed, and the memory store has one that is fast in plain Python.
"""

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvferry.layout import HEADER_BYTES, PageGeometry
from kvferry.pages.base import Outcome, PageId, SegmentFacts

MAGIC = b"kvferry\x00"
FORMAT_VERSION = 1  # 1: the first
TEMPLATE_BYTES = 256  # all named fields; the rest of the block is zeros

_FIELDS = struct.Struct("<8sII32s32s32s16s16sIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = 248
_HOLE = bytes(HEADER_BYTES)

Digest = Callable[[bytes | bytearray | memoryview], int]
"""64 bits over a buffer whose length is a multiple of 4,096."""


class SliceHeader(NamedTuple):
    """What a valid header says."""

    page: PageId
    slice_index: int
    slice_count: int
    payload_bytes: int
    payload_checksum: int


def template(page: PageId, geometry: PageGeometry) -> bytes:
    """The first 256 bytes of every header of a page; slice index and checksums are zero."""
    return _fields(page, geometry, 0, 0).ljust(TEMPLATE_BYTES, b"\x00")


def pack(
    page: PageId, geometry: PageGeometry, slice_index: int, payload_checksum: int, digest: Digest
) -> bytes:
    """The header block, 4,096 bytes. `payload_checksum`: `digest` of the padded payload."""
    return seal(bytearray(_fields(page, geometry, slice_index, payload_checksum)), digest)


def inspect(block: bytes | memoryview, digest: Digest) -> SliceHeader | Outcome:
    """What a header block says; ABSENT for a hole, CORRUPT if damaged, FOREIGN if it is intact
    and of a version that this code does not know."""
    if block == _HOLE:
        return Outcome.ABSENT
    fields = _FIELDS.unpack_from(block)
    if fields[0] != MAGIC or not is_intact(block, digest):
        return Outcome.CORRUPT
    version, length_bytes = fields[1:3]
    if version != FORMAT_VERSION or length_bytes != HEADER_BYTES:
        return Outcome.FOREIGN
    namespace, key, parent, generation, tenant, chunk_index, group, *shape = fields[3:]
    page = PageId(namespace, key, parent, chunk_index, group, generation, tenant)
    return SliceHeader(page, *shape)


def verify(
    block: bytes | memoryview,
    page: PageId,
    geometry: PageGeometry,
    slice_index: int,
    digest: Digest,
) -> SliceHeader | Outcome:
    """As `inspect`, and FOREIGN for an intact header of anything but what was asked for."""
    found = inspect(block, digest)
    if isinstance(found, Outcome):
        return found
    asked = (page.namespace, page.key, page.generation)
    shape = (slice_index, geometry.slice_count, geometry.payload_bytes)
    says = (found.page.namespace, found.page.key, found.page.generation)
    return found if says == asked and found[1:4] == shape else Outcome.FOREIGN


def page_of(
    blocks: Iterable[bytes | memoryview], segment: SegmentFacts, digest: Digest
) -> PageId | None:
    """The page that the headers of all slices of a slot name; None unless all are intact, of one
    page and generation, and of the segment's namespace and geometry. Takes no more blocks than
    it needs."""
    geometry = segment.geometry
    page = None
    for slice_index, block in enumerate(blocks):
        found = inspect(block, digest)
        if isinstance(found, Outcome) or found.page.namespace != segment.namespace:
            return None
        page = page or found.page
        expected = (page, slice_index, geometry.slice_count, geometry.payload_bytes)
        if found[:4] != expected:
            return None
    return page


def seal(block: bytearray, digest: Digest) -> bytes:
    """Fills a header block up to 4,096 bytes and stamps its checksum."""
    block.extend(bytes(HEADER_BYTES - len(block)))
    _CHECKSUM.pack_into(block, _CHECKSUM_OFFSET, digest(block))
    return bytes(block)


def is_intact(block: bytes | bytearray | memoryview, digest: Digest) -> bool:
    """Whether a header block has the checksum that it was sealed with."""
    blank = bytearray(block)
    (stored,) = _CHECKSUM.unpack_from(blank, _CHECKSUM_OFFSET)
    _CHECKSUM.pack_into(blank, _CHECKSUM_OFFSET, 0)
    return digest(blank) == stored


def _fields(page: PageId, geometry: PageGeometry, slice_index: int, checksum: int) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        page.namespace,
        page.key,
        page.parent,
        page.generation,
        page.tenant,
        page.chunk_index,
        page.group,
        slice_index,
        geometry.slice_count,
        geometry.payload_bytes,
        checksum,
    )
