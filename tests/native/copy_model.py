"""What gather and scatter mean, byte by byte: the model of `_native.BlockMap`."""

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry import _native

from .buffers import Buffer

HEADER_BYTES = 64
BLOCK_COUNT = 5


@dataclass(frozen=True)
class Shape:
    """One layer as `BlockMap` takes it; `offset_bytes` stands for its base address."""

    offset_bytes: int
    kernel_blocks: int
    block_tokens: int
    content_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int

    @property
    def block_head_bytes(self) -> int:
        return self.kernel_blocks * self.block_tokens * self.content_bytes

    def runs(self, block: int, head: int):
        """Where the bytes of one block of one head lie, in canonical order."""
        for kernel_block in range(self.kernel_blocks):
            for token in range(self.block_tokens):
                yield (
                    self.offset_bytes
                    + (block * self.kernel_blocks + kernel_block) * self.block_stride_bytes
                    + head * self.head_stride_bytes
                    + token * self.token_stride_bytes
                )


@dataclass(frozen=True)
class Engine:
    """Layers in one piece of memory of `memory_bytes`."""

    shapes: tuple[Shape, ...]
    head_count: int
    memory_bytes: int

    def slice_bytes(self, blocks: list[int], padding_bytes: int = 0) -> int:
        payload_bytes = len(blocks) * sum(shape.block_head_bytes for shape in self.shapes)
        return HEADER_BYTES + payload_bytes + padding_bytes

    def positions(self, blocks: list[int], slice_bytes: int):
        """(place in the extent, place in memory, length) of each run; None for a skipped one."""
        for head in range(self.head_count):
            place = head * slice_bytes + HEADER_BYTES
            for shape in self.shapes:
                for block in blocks:
                    for start in shape.runs(block, head):
                        yield place, start if block >= 0 else None, shape.content_bytes
                        place += shape.content_bytes

    def gathered(self, memory, extent, blocks: list[int], slice_bytes: int) -> bytes:
        expected = bytearray(extent)
        for head in range(self.head_count):
            end = (head + 1) * slice_bytes
            expected[head * slice_bytes + HEADER_BYTES : end] = bytes(slice_bytes - HEADER_BYTES)
        for place, start, length in self.positions(blocks, slice_bytes):
            expected[place : place + length] = memory[start : start + length]
        return bytes(expected)

    def scattered(self, memory, extent, blocks: list[int], slice_bytes: int) -> bytes:
        expected = bytearray(memory)
        for place, start, length in self.positions(blocks, slice_bytes):
            if start is not None:
                expected[start : start + length] = extent[place : place + length]
        return bytes(expected)

    def block_map(self, memory: Buffer, slice_bytes: int) -> _native.BlockMap:
        layers = [
            (
                memory.address + shape.offset_bytes,
                shape.kernel_blocks,
                shape.block_tokens,
                shape.content_bytes,
                shape.block_stride_bytes,
                shape.head_stride_bytes,
                shape.token_stride_bytes,
            )
            for shape in self.shapes
        ]
        return _native.BlockMap(layers, self.head_count, HEADER_BYTES, slice_bytes)


@st.composite
def engines(draw) -> Engine:
    """Layers of any nesting of block, head and token, with and without gaps; opaque ones too."""
    head_count = draw(st.integers(1, 3))
    shapes, end_bytes = [], 0
    for _ in range(draw(st.integers(1, 3))):
        kernel_blocks = draw(st.sampled_from([1, 1, 2, 3]))
        block_tokens = draw(st.sampled_from([1, 2, 4]))
        content_bytes = draw(st.sampled_from([1, 24, 128, 256, 512, 520]))
        counts = {
            "block": BLOCK_COUNT * kernel_blocks,
            "head": head_count,
            "token": block_tokens,
        }
        strides, size_bytes = {}, content_bytes
        for name in draw(st.permutations(list(counts))):
            strides[name] = size_bytes + draw(st.sampled_from([0, 0, 8]))
            size_bytes = strides[name] * counts[name]
        shapes.append(
            Shape(
                end_bytes,
                kernel_blocks,
                block_tokens,
                content_bytes,
                strides["block"],
                strides["head"],
                strides["token"],
            )
        )
        end_bytes += size_bytes
    return Engine(tuple(shapes), head_count, end_bytes)


def noise(length_bytes: int, seed: int) -> Buffer:
    """Bytes that differ everywhere and are the same each time."""
    return Buffer.of(random.Random(seed).randbytes(length_bytes))
