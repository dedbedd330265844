"""Measures gather and scatter against memcpy of as many bytes, on one thread.

Engine memory and staging are each larger than the processor's caches, and blocks are taken in a
shuffled order, as a busy engine hands them out. Extents are copied and timed one by one, the verbs
in turn and each in another part of the staging: a median over so many short samples says little
about what else the machine did meanwhile.
"""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry import _native
from kvferry.cli.bench_io import Memory
from kvferry.clock import Clock
from kvferry.layout import HEADER_BYTES

LAYERS = 16
HEADS = 8
BLOCK_TOKENS = 16
TOKEN_BYTES = 512  # K and V of one head: 128 numbers of 2 bytes each
CHUNK_BLOCKS = 4
BLOCKS = 128
EXTENTS = 16

HEAD_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
BLOCK_BYTES = HEADS * HEAD_BLOCK_BYTES
PAYLOAD_BYTES = LAYERS * CHUNK_BLOCKS * HEAD_BLOCK_BYTES
SLICE_BYTES = HEADER_BYTES + PAYLOAD_BYTES
EXTENT_BYTES = HEADS * SLICE_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """How one block lies in engine memory: kernel blocks, tokens, content, and the strides of
    block, head and token, as `_native.BlockMap` takes them after the base address."""

    name: str
    sizes: tuple[int, int, int, int, int, int]


LAYOUTS = (
    Layout("heads outside, or opaque blocks", (1, 1, 8192, BLOCK_BYTES, 8192, 8192)),
    Layout("tokens outside", (1, BLOCK_TOKENS, 512, BLOCK_BYTES, 512, HEADS * 512)),
)


def measure(clock: Clock, round_count: int) -> list[dict[str, Any]]:
    """Medians over the rounds, for each layout: GB/s of gather, scatter and memcpy, and ratios."""
    engine, staging = Memory(LAYERS * BLOCKS * BLOCK_BYTES), Memory(EXTENTS * EXTENT_BYTES)
    return [_compare(clock, layout, engine, staging, round_count) for layout in LAYOUTS]


def _compare(
    clock: Clock, layout: Layout, engine: Memory, staging: Memory, round_count: int
) -> dict[str, Any]:
    layers = [
        (engine.address + layer * BLOCKS * BLOCK_BYTES, *layout.sizes) for layer in range(LAYERS)
    ]
    block_map = _native.BlockMap(layers, HEADS, HEADER_BYTES, SLICE_BYTES)
    extents = [
        ([(extent * CHUNK_BLOCKS + i) * 37 % BLOCKS for i in range(CHUNK_BLOCKS)], place)
        for extent, place in enumerate(
            range(staging.address, staging.address + EXTENTS * EXTENT_BYTES, EXTENT_BYTES)
        )
    ]
    content_bytes = HEADS * PAYLOAD_BYTES

    def memcpy(blocks: list[int], place: int) -> None:
        source = engine.address + blocks[0] * content_bytes % (len(engine.view) - content_bytes)
        ctypes.memmove(place, source, content_bytes)

    verbs: dict[str, Callable] = {
        "memcpy": memcpy,
        "gather": block_map.gather,
        "scatter": block_map.scatter,
    }
    times_s: dict[str, list[float]] = {name: [] for name in verbs}
    for step in range(round_count * EXTENTS):
        for turn, (name, verb) in enumerate(verbs.items()):
            blocks, place = extents[(step + turn * EXTENTS // len(verbs)) % EXTENTS]
            start_s = clock.now_s()
            verb(blocks, place)
            times_s[name].append(clock.now_s() - start_s)
    medians = {
        name: content_bytes / statistics.median(found) / 1e9 for name, found in times_s.items()
    }
    return {
        "layout": layout.name,
        "extent_bytes": EXTENT_BYTES,
        "rounds": round_count,
        "gb_per_s": {name: round(rate, 2) for name, rate in medians.items()},
        "ratios_to_memcpy": {
            name: round(medians[name] / medians["memcpy"], 3) for name in ("gather", "scatter")
        },
    }
