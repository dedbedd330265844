"""The slice header: an engine of today must read what an engine of last year has stored."""

import pytest

from kvferry.checksum import checksum_reference
from kvferry.layout import PageGeometry
from kvferry.pages import header
from kvferry.pages.base import Outcome, PageId, SegmentFacts
from tests.pages import golden

PAGE = PageId(
    namespace=bytes(range(32)),
    key=bytes(range(32, 64)),
    parent=bytes(range(64, 96)),
    chunk_index=0x01020304,
    group=0xA1B2C3D4,
    generation=bytes(range(96, 112)),
    tenant=bytes(range(112, 128)),
)
GEOMETRY = PageGeometry(slice_count=8, payload_bytes=5000, chunk_tokens=64)
SLICE_INDEX = 5
CHECKSUM = 0x1122334455667788


def _block() -> bytes:
    return header.pack(PAGE, GEOMETRY, SLICE_INDEX, CHECKSUM, checksum_reference)


def _verify(block: bytes, page=PAGE, geometry=GEOMETRY, slice_index=SLICE_INDEX):
    return header.verify(block, page, geometry, slice_index, checksum_reference)


def test_a_header_is_what_the_golden_file_says():
    assert golden.to_rows(_block()) == golden.load("slice_header.json")


def test_a_header_of_the_golden_file_is_understood():
    block = bytearray(4096)
    for offset, row in golden.load("slice_header.json").items():
        block[int(offset, 16) : int(offset, 16) + 16] = bytes.fromhex(row)
    assert _verify(block) == header.SliceHeader(PAGE, SLICE_INDEX, 8, 5000, CHECKSUM)


def test_documented_offsets():
    block = _block()
    assert len(block) == 4096
    assert block[:8] == b"kvferry\0"
    assert block[16:48] == PAGE.namespace
    assert block[48:80] == PAGE.key
    assert block[80:112] == PAGE.parent
    assert block[112:128] == PAGE.generation
    assert block[128:144] == PAGE.tenant
    assert int.from_bytes(block[160:168], "little") == 5000
    assert int.from_bytes(block[168:176], "little") == CHECKSUM
    blank = block[:248] + bytes(8) + block[256:]
    assert int.from_bytes(block[248:256], "little") == checksum_reference(blank)


def test_the_template_is_the_header_without_what_differs_between_slices():
    template = header.template(PAGE, GEOMETRY)
    assert len(template) == header.TEMPLATE_BYTES
    block = bytearray(_block())
    for start, end in ((152, 156), (168, 176), (248, 256)):
        block[start:end] = bytes(end - start)
    assert template == block[: len(template)] and not any(block[len(template) :])


@pytest.mark.parametrize(
    "asked",
    [
        {"slice_index": 4},
        {"geometry": PageGeometry(9, 5000, 64)},
        {"geometry": PageGeometry(8, 5001, 64)},
    ],
)
def test_another_slice_or_shape_is_foreign(asked):
    assert _verify(_block(), **asked) is Outcome.FOREIGN


def test_a_hole_is_absent_and_any_flipped_bit_is_a_miss():
    assert _verify(bytes(4096)) is Outcome.ABSENT
    block = bytearray(_block())
    for bit in range(0, 4096 * 8, 61):
        block[bit // 8] ^= 1 << bit % 8
        assert _verify(block) is Outcome.CORRUPT, bit
        block[bit // 8] ^= 1 << bit % 8
    assert isinstance(_verify(block), header.SliceHeader)


def test_a_later_format_version_is_foreign_not_corrupt():
    block = bytearray(_block())
    block[8:12] = (2).to_bytes(4, "little")
    block[248:256] = bytes(8)
    block[248:256] = checksum_reference(block).to_bytes(8, "little")
    assert _verify(block) is Outcome.FOREIGN


def test_a_page_is_found_by_its_headers_only_if_they_agree():
    geometry = PageGeometry(2, 5000, 64)
    segment = SegmentFacts(1, PAGE.namespace, geometry, 4)
    blocks = [header.pack(PAGE, geometry, index, 1, checksum_reference) for index in range(2)]
    assert header.page_of(blocks, segment, checksum_reference) == PAGE
    assert header.page_of(blocks[::-1], segment, checksum_reference) is None
    assert header.page_of([blocks[0], bytes(4096)], segment, checksum_reference) is None


def test_checksum_depends_on_position_and_length():
    one, two = bytes(4096), bytes([1]) + bytes(4095)
    values = [checksum_reference(data) for data in (one, two, one + two, two + one, one + one)]
    assert len(set(values)) == 5
    assert f"{values[-1]:016x}" == "21373507fbed8ccd"  # as when the format was fixed
