"""The checksum of pages, version 1, in readable form: docs/formats.md.

The reference that the native and the GPU form are held against; about 100 KB/s. The data path
uses `_native.checksum`.
"""

LANE_BYTES = 4096
_ROWS = 8
_COLUMNS = 64
_MASK = (1 << 64) - 1
_P1 = 0x9E3779B185EBCA87
_P2 = 0xC2B2AE3D27D4EB4F
_G = 0x9E3779B97F4A7C15


def checksum_reference(data: bytes) -> int:
    """64 bits over `data`, whose length is a multiple of 4,096 bytes (ValueError otherwise)."""
    if len(data) % LANE_BYTES:
        raise ValueError(f"{len(data)} bytes are not a multiple of {LANE_BYTES}")
    words = memoryview(data).cast("Q")
    total = 0
    for lane in range(len(data) // LANE_BYTES):
        first = lane * _ROWS * _COLUMNS
        lane_sum = _lane_sum(words[first : first + _ROWS * _COLUMNS])
        total += _mix((lane_sum + (lane + 1) * _G) & _MASK)
    return _mix((total & _MASK) ^ len(data))


def _lane_sum(words: memoryview) -> int:
    return sum(_mix(_column(words[column::_COLUMNS], column)) for column in range(_COLUMNS))


def _column(words: memoryview, column: int) -> int:
    state = (column + 1) * _G & _MASK
    for word in words:
        state = _rotl31((state ^ word) * _P1 & _MASK)
    return state


def _rotl31(x: int) -> int:
    return (x << 31 | x >> 33) & _MASK


def _mix(x: int) -> int:
    x ^= x >> 32
    x = x * _P2 & _MASK
    return x ^ x >> 29
