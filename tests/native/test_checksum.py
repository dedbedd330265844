"""The checksum is a format: stored pages become unreadable if one implementation drifts."""

import json
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import _native
from kvferry.checksum import LANE_BYTES, checksum_reference

from .buffers import Buffer

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/checksum.json").read_text())
G = 0x9E3779B97F4A7C15


def content(fill: str, length_bytes: int) -> bytes:
    """The golden inputs. `words`: 64-bit words (i + 1) * G."""
    if fill == "words":
        words = [(i + 1) * G % (1 << 64) for i in range(length_bytes // 8)]
        return struct.pack(f"<{len(words)}Q", *words)
    return {"zeros": b"\x00", "ones": b"\xff"}[fill] * length_bytes


def native(data: bytes) -> int:
    buffer = Buffer.of(data)
    return _native.checksum(buffer.address, len(data))


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: f"{v['fill']}-{v['length_bytes']}")
def test_stored_pages_stay_readable(vector):
    data = content(vector["fill"], vector["length_bytes"])
    assert f"{checksum_reference(data):016x}" == vector["checksum"]
    assert f"{native(data):016x}" == vector["checksum"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.integers(0, 2**32))
def test_native_equals_reference(lane_count, seed):
    data = random.Random(seed).randbytes(lane_count * LANE_BYTES)
    assert native(data) == checksum_reference(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2 * LANE_BYTES * 8 - 1), st.binary(min_size=8, max_size=8))
def test_a_flipped_bit_is_found(bit, seed):
    data = bytearray(seed * (2 * LANE_BYTES // 8))
    before = native(data)
    data[bit // 8] ^= 1 << bit % 8
    assert native(data) != before


def test_swapped_lanes_columns_and_rows_are_found():
    data = content("words", 2 * LANE_BYTES)
    lanes = data[LANE_BYTES:] + data[:LANE_BYTES]
    columns = data[8:16] + data[:8] + data[16:]
    rows = data[512:1024] + data[:512] + data[1024:]
    assert len({native(each) for each in (data, lanes, columns, rows)}) == 4


@pytest.mark.parametrize(("shift", "length_bytes"), [(0, 4095), (0, 8), (4, 4096)])
def test_lengths_and_addresses_that_would_read_beside_the_payload_are_refused(shift, length_bytes):
    buffer = Buffer(2 * LANE_BYTES)
    with pytest.raises(ValueError, match="multiple"):
        _native.checksum(buffer.address + shift, length_bytes)


def test_the_reference_refuses_a_ragged_length():
    with pytest.raises(ValueError, match="multiple"):
        checksum_reference(bytes(100))
