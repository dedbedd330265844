"""Arithmetic of chunks: which boundary can be served, which blocks a chunk covers. Pure."""

import math
from collections.abc import Sequence

from kvferry.catalog.base import Hit
from kvferry.device.base import SKIP
from kvferry.offload.base import Part

NULL_BLOCK = 0
"""vLLM's placeholder in block tables of windowed groups."""


def servable_boundary(
    parts: Sequence[Part],
    hits: Sequence[Sequence[Hit | None]],
    computed_tokens: int,
    limit_tokens: int,
) -> int:
    """The greatest token count that all parts can serve, or `computed_tokens` if none is greater.

    `hits[p][i]`: answer for chunk `i` of part `p`. Tokens before `computed_tokens` are in engine
    memory already. The result is at most `limit_tokens` and a multiple of every chunk size.
    """
    stride = math.lcm(*(part.chunk_tokens for part in parts))
    runs = [_run_lengths(answers) for answers in hits]
    boundary = limit_tokens - limit_tokens % stride
    while boundary > computed_tokens:
        needs = [_shortfall(part, run, computed_tokens, boundary) for part, run in zip(parts, runs)]
        if not any(needs):
            return boundary
        boundary -= stride
    return computed_tokens


def _run_lengths(answers: Sequence[Hit | None]) -> list[int]:
    """For each chunk, how many hits in a row end with it."""
    lengths, run = [], 0
    for answer in answers:
        run = run + 1 if answer is not None else 0
        lengths.append(run)
    return lengths


def first_needed_chunk(part: Part, computed_tokens: int, boundary: int) -> int:
    """The first chunk that must be loaded to go on from `boundary`: a window reaches back to
    `boundary - window + 1`."""
    first_token = computed_tokens
    if part.window_tokens is not None:
        first_token = max(first_token, boundary - part.window_tokens + 1)
    return first_token // part.chunk_tokens


def _shortfall(part: Part, runs: Sequence[int], computed_tokens: int, boundary: int) -> bool:
    last = boundary // part.chunk_tokens - 1
    needed = last + 1 - first_needed_chunk(part, computed_tokens, boundary)
    return last >= len(runs) or runs[last] < needed


def chunk_blocks(part: Part, table: Sequence[int], chunk_index: int) -> tuple[int, ...]:
    """The blocks of one chunk in the request's block table of the part's group."""
    count = part.chunk_tokens // part.block_tokens
    first = chunk_index * count
    return tuple(table[first : first + count])


def blocks_to_load(
    part: Part, table: Sequence[int], chunk_index: int, start_token: int, end_token: int
) -> tuple[int, ...]:
    """As `chunk_blocks`, with SKIP for blocks outside [start_token, end_token) or not there."""
    count = part.chunk_tokens // part.block_tokens
    blocks = []
    for index in range(chunk_index * count, (chunk_index + 1) * count):
        first_token = index * part.block_tokens
        is_wanted = start_token <= first_token < end_token and index < len(table)
        blocks.append(table[index] if is_wanted and table[index] != NULL_BLOCK else SKIP)
    return tuple(blocks)
