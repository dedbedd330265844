"""Gather and scatter as one Triton kernel: between the blocks of many layers and extents in a
buffer of the device.

A program moves a tile of one block of one layer: rows are runs of contiguous bytes (a token of a
head, or all of a head's tokens where they lie together), columns are words of a run. On the page's
side the runs of a head follow each other; on the engine's side each has its own address. Bytes are
moved as the widest words that every address allows, 16 bytes at a time where they are aligned so.

Memory is named by addresses: the engine's tensors are regions here, as for any other copier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from kvferry.layout import HEADER_BYTES, PageGeometry, Region

TILE_WORDS = 2048
WIDEST_WORD_BYTES = 8
VECTOR_BYTES = 16
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
HEADER = tl.constexpr(HEADER_BYTES)


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
