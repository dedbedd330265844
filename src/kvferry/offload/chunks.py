"""Arithmetic of chunks: which boundary can be served, which blocks a chunk covers. Pure."""

import math
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import NamedTuple

from kvferry.device.base import SKIP
from kvferry.offload.base import Part

NULL_BLOCK = 0
"""vLLM's placeholder in block tables of windowed groups."""


class Runs(NamedTuple):
    """Where hits lie among the chunks of one part, made once per lookup.

    `back[i]`: how many hits in a row end with chunk `i`; `ahead[i]`: how many start with it.
    """

    back: list[int]
    ahead: list[int]


def runs_of(hits: Collection[int], count: int) -> Runs:
    """Of `count` chunks, `hits` of which are there. Runs are few, so little is done for each
    chunk."""
    marks = bytearray(count)
    for hit in hits:
        marks[hit] = 1
    back: list[int] = []
    ahead: list[int] = []
    start = 0
    while start < count:
        end = _place(marks, b"\0", start)
        back.extend(range(1, end - start + 1))
        ahead.extend(range(end - start, 0, -1))
        start = _place(marks, b"\1", end)
        back.extend(repeat(0, start - end))
        ahead.extend(repeat(0, start - end))
    return Runs(back, ahead)


def _place(marks: bytearray, mark: bytes, start: int) -> int:
    """Where `mark` comes first from `start` on; the end if nowhere."""
    place = marks.find(mark, start)
    return place if place >= 0 else len(marks)


def servable_boundary(
    parts: Sequence[Part], runs: Sequence[Runs], computed_tokens: int, limit_tokens: int
) -> int:
    """The greatest token count that all parts can serve, or `computed_tokens` if none is greater.

    Tokens before `computed_tokens` are in engine memory already. The result is at most
    `limit_tokens` and a multiple of every chunk size. The source of the rule for windows is
    vLLM's suffix lookup: only the last window before the boundary must be there.
    """
    stride = math.lcm(*(part.chunk_tokens for part in parts))
    boundary = min(limit_tokens, _reach(parts, runs, computed_tokens))
    boundary -= boundary % stride
    while boundary > computed_tokens:
        if all(
            _serves(part, run, computed_tokens, boundary)
            for part, run in zip(parts, runs, strict=True)
        ):
            return boundary
        boundary -= stride
    return computed_tokens


def _reach(parts: Sequence[Part], runs: Sequence[Runs], computed_tokens: int) -> int:
    """How far the parts without a window go, and the last chunk that all have."""
    reaches = []
    for part, run in zip(parts, runs, strict=True):
        end = len(run.ahead)
        first = computed_tokens // part.chunk_tokens
        if part.window_tokens is None:
            end = first + run.ahead[first] if first < end else 0
        reaches.append(end * part.chunk_tokens)
    return min(reaches)


def _serves(part: Part, runs: Runs, computed_tokens: int, boundary: int) -> bool:
    last = boundary // part.chunk_tokens - 1
    needed = last + 1 - first_needed_chunk(part, computed_tokens, boundary)
    return last < len(runs.back) and runs.back[last] >= needed


def first_needed_chunk(part: Part, computed_tokens: int, boundary: int) -> int:
    """The first chunk that must be loaded to go on from `boundary`: a window reaches back to
    `boundary - window + 1`."""
    first_token = computed_tokens
    if part.window_tokens is not None:
        first_token = max(first_token, boundary - part.window_tokens + 1)
    return first_token // part.chunk_tokens


def span_blocks(part: Part, table: Sequence[int], first: int, end: int) -> tuple[int, ...]:
    """Blocks of the chunks [first, end) in the block table of the part's group, as long as the
    table has them."""
    width = part.chunk_tokens // part.block_tokens
    return tuple(table[first * width : end * width])


def blocks_to_load(
    part: Part, blocks: Sequence[int], chunk_index: int, start_token: int, end_token: int
) -> tuple[int, ...]:
    """A chunk's blocks with SKIP for those that are not there or outside [start, end)."""
    first_token = chunk_index * part.chunk_tokens
    return tuple(
        block
        if block > NULL_BLOCK and start_token <= first_token + i * part.block_tokens < end_token
        else SKIP
        for i, block in enumerate(blocks)
    )
