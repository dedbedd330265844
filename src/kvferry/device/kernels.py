"""Gather and scatter as one Triton kernel, between the blocks of many layers and extents in a
buffer of the device; and a second one that computes the checksums of slices in that buffer.

A program of the first moves a tile of one block of one layer: rows are runs of contiguous bytes (a
token of a head, or all of a head's tokens where they lie together), columns are words of a run. On
the page's side the runs of a head follow each other; on the engine's side each has its own address.
Bytes are moved as the widest words that every address allows, 16 bytes at a time where they are
aligned so.

A program of the second has a slice to itself, so that nothing has to be zeroed, added up by others
or finished by the host. To a scatter it is a gate: a piece with a slice that is not what it should
be loses its blocks, and the first kernel, next in the queue, finds nothing to do for it.

Memory is named by addresses: the engine's tensors are regions here, as for any other copier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from kvferry.checksum import LANE_BYTES
from kvferry.device.base import SKIP
from kvferry.layout import HEADER_BYTES, PageGeometry, Region

TILE_WORDS = 2048
WIDEST_WORD_BYTES = 8
VECTOR_BYTES = 16
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
HEADER = tl.constexpr(HEADER_BYTES)
VECTOR = tl.constexpr(VECTOR_BYTES)
LEFT_OUT = tl.constexpr(SKIP)
P1 = tl.constexpr(0x9E3779B185EBCA87)
P2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
G = tl.constexpr(0x9E3779B97F4A7C15)
LANE = tl.constexpr(LANE_BYTES)
LANES_AT_ONCE = 32
CHECKSUM_WARPS = 32


@triton.jit(do_not_specialize=["buffer", "block_count"])
def move_blocks(
    layers,
    blocks,
    buffer,
    block_count,
    IS_GATHER: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEADS: tl.constexpr,
    KERNEL_BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_BYTES: tl.constexpr,
    SLICE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """`layers`: int64 [layer, 5], see `Shape.table`. `blocks`: int64 [piece, block_count]; those
    below 0 are left out. `buffer`: the address of the first piece's extent; extents follow each
    other. Grid: (blocks of all pieces * TILES, layers)."""
    entry = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    block = tl.load(blocks + entry)
    if block < 0:
        return
    layer = layers + tl.program_id(1) * 5
    row = (tile % ROW_TILES) * ROWS + tl.arange(0, ROWS)
    column = (tile // ROW_TILES) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = (row < HEADS * KERNEL_BLOCKS * RUNS)[:, None] & (column < RUN_BYTES // WORD_BYTES)[
        None, :
    ]

    head = (row // (KERNEL_BLOCKS * RUNS)).to(tl.int64)
    run = row % (KERNEL_BLOCKS * RUNS)
    kernel_block = block * KERNEL_BLOCKS + run // RUNS
    engine = tl.load(layer) + kernel_block * tl.load(layer + 1)
    engine += head * tl.load(layer + 2) + (run % RUNS) * tl.load(layer + 3)

    piece = (entry // block_count).to(tl.int64)
    first_run = (entry % block_count) * (KERNEL_BLOCKS * RUNS)
    page = buffer.to(tl.int64) + (piece * HEADS + head) * SLICE_BYTES + HEADER
    page += tl.load(layer + 4) * block_count + (first_run + run).to(tl.int64) * RUN_BYTES

    pointer: tl.constexpr = tl.pointer_type(WORD)
    engine_words = tl.multiple_of(engine.to(pointer), ALIGNMENT)[:, None] + column[None, :]
    page_words = tl.multiple_of(page.to(pointer), ALIGNMENT)[:, None] + column[None, :]
    if IS_GATHER:
        tl.store(page_words, tl.load(engine_words, mask=is_there), mask=is_there)
    else:
        tl.store(engine_words, tl.load(page_words, mask=is_there), mask=is_there)


@triton.jit
def mix(x):
    x = x ^ (x >> 32)
    x = x * P2
    return x ^ (x >> 29)


@triton.jit(
    do_not_specialize=["buffer", "slice_bytes", "heads", "lane_count", "block_count", "is_gate"]
)
def prove_slices(
    slip, buffer, slice_bytes, heads, lane_count, block_count, is_gate, LANES: tl.constexpr
):
    """The checksum of docs/formats.md over `lane_count` lanes after the header of each slice;
    slices lie `slice_bytes` apart from the address `buffer` on, `heads` of them for each piece.
    Grid: (slices). `slip`, `is_gate`: see `SliceProver`. Arithmetic is unsigned, modulo 2^64."""
    index = tl.program_id(0).to(tl.int64)
    start = (buffer.to(tl.int64) + index * slice_bytes + HEADER).to(tl.pointer_type(tl.int64))
    column = tl.arange(0, 64)
    seed = ((column + 1).to(tl.uint64) * G)[None, :]
    totals = tl.zeros([LANES], tl.uint64)
    for first in range(0, lane_count, LANES):
        lane = first + tl.arange(0, LANES)
        words = start + tl.minimum(lane, lane_count - 1) * 512
        words = tl.multiple_of(words, VECTOR)[:, None] + column[None, :]
        state = tl.zeros([LANES, 64], tl.uint64) + seed
        for row in tl.static_range(8):
            word = tl.load(words + row * 64)
            state = (state ^ word.to(tl.uint64, bitcast=True)) * P1
            state = (state << 31) | (state >> 33)
        mixed = mix(tl.sum(mix(state), axis=1) + (lane + 1).to(tl.uint64) * G)
        totals += tl.where(lane < lane_count, mixed, 0)
    length_bytes = (lane_count * LANE).to(tl.uint64)
    found = mix(tl.sum(totals, axis=0) ^ length_bytes).to(tl.int64, bitcast=True)
    slice_count = tl.num_programs(0)
    tl.store(slip + index, found)
    expected = tl.load(slip + slice_count + index)
    if (is_gate != 0) & (found != expected):
        blocks = slip + 2 * slice_count + (index // heads) * block_count
        for place in range(block_count):
            tl.store(blocks + place, LEFT_OUT)


@dataclass(frozen=True)
class Shape:
    """Layers that one launch serves: what a block of theirs looks like is equal, where it lies is
    not. A run is contiguous on both sides; `runs` of them make a head's part of a kernel block.

    `table`: for each layer its base address, the strides of kernel block, head and run, and the
    bytes that the layers before it have in one block of a slice.
    """

    kernel_blocks: int
    runs: int
    run_bytes: int
    table: tuple[tuple[int, int, int, int, int], ...]

    @property
    def alignment_bytes(self) -> int:
        """The largest power of two, at most 16, that divides all addresses of runs."""
        steps = VECTOR_BYTES | self.run_bytes
        for row in self.table:
            for step in row:
                steps |= step
        return steps & -steps


def shapes(regions: Sequence[Region]) -> Iterator[Shape]:
    """The launches that serve all `regions`, which are given in layer order."""
    lengths = [region.block_head_bytes for region in regions]
    found: dict[tuple[int, int, int], list[tuple[int, int, int, int, int]]] = {}
    for region, before_bytes in zip(regions, accumulate(lengths, initial=0), strict=False):
        runs, run_bytes = region.block_tokens, region.content_bytes
        if region.token_stride_bytes == run_bytes:
            runs, run_bytes = 1, runs * run_bytes
        strides = (
            region.block_stride_bytes,
            region.head_stride_bytes if region.head_count > 1 else 0,
            region.token_stride_bytes if runs > 1 else 0,
        )
        row = (region.base_address, *strides, before_bytes)
        found.setdefault((region.kernel_blocks, runs, run_bytes), []).append(row)
    for key, rows in found.items():
        yield Shape(*key, tuple(rows))


class BlockMover:
    """Launches for one cache group on one device. `regions` in layer order.

    `move` only enqueues, on the current stream of `device`. One thread at a time.
    """

    def __init__(self, regions: Sequence[Region], geometry: PageGeometry, device: torch.device):
        self._head_count = regions[0].head_count
        self._slice_bytes = geometry.slice_bytes
        self._launches = [
            (torch.tensor(shape.table, dtype=torch.int64, device=device), self._sizes(shape))
            for shape in shapes(regions)
        ]

    def move(
        self, is_gather: bool, blocks: torch.Tensor, buffer_address: int, block_count: int
    ) -> None:
        """Blocks to extents or back. `blocks`: int64 that the device can read, `block_count` for
        each piece, alive until the launch has run; ids below 0 are left out. The extents lie one
        after the other from `buffer_address` on."""
        for table, sizes in self._launches:
            grid = (blocks.numel() * sizes["TILES"], len(table))
            move_blocks[grid](
                table, blocks, buffer_address, block_count, IS_GATHER=is_gather, **sizes
            )

    def _sizes(self, shape: Shape) -> dict:
        alignment = shape.alignment_bytes
        word_bytes = min(alignment, WIDEST_WORD_BYTES)
        run_words = shape.run_bytes // word_bytes
        row_count = self._head_count * shape.kernel_blocks * shape.runs
        columns = min(triton.next_power_of_2(run_words), TILE_WORDS)
        rows = min(triton.next_power_of_2(row_count), TILE_WORDS // columns)
        row_tiles = triton.cdiv(row_count, rows)
        return {
            "WORD": WORDS[word_bytes],
            "WORD_BYTES": word_bytes,
            "ALIGNMENT": alignment,
            "HEADS": self._head_count,
            "KERNEL_BLOCKS": shape.kernel_blocks,
            "RUNS": shape.runs,
            "RUN_BYTES": shape.run_bytes,
            "SLICE_BYTES": self._slice_bytes,
            "ROWS": rows,
            "COLUMNS": columns,
            "TILES": row_tiles * triton.cdiv(run_words, columns),
            "ROW_TILES": row_tiles,
        }


class SliceProver:
    """Launches `prove_slices` for one cache group. As `BlockMover`: only enqueues."""

    def __init__(self, head_count: int, geometry: PageGeometry):
        self._head_count = head_count
        self._slice_bytes = geometry.slice_bytes
        self._lane_count = geometry.padded_payload_bytes // LANE_BYTES

    def prove(
        self,
        slip: torch.Tensor,
        slice_count: int,
        buffer_address: int,
        block_count: int,
        is_gate: bool,
    ) -> None:
        """Checksums of slices whose extents lie one after the other from `buffer_address` on.
        `is_gate`: a piece of which one differs loses its blocks. `slip`: int64 that the device
        reads and writes, alive until the launch has run:

            [0, slice_count)                the checksums that were found
            [slice_count, 2 * slice_count)  for a gate, what they should be
            from there on                   for a gate, `block_count` blocks for each piece
        """
        prove_slices[(slice_count,)](
            slip,
            buffer_address,
            self._slice_bytes,
            self._head_count,
            self._lane_count,
            block_count,
            int(is_gate),
            LANES=LANES_AT_ONCE,
            num_warps=CHECKSUM_WARPS,
        )
