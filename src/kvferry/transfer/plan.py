"""Who reads what from whom: pure functions from two topologies to lanes and reads.

A *lane* leads from one group of one source rank to one group of one target rank: the layers that
both have, by name, and the KV heads that this target takes from this source. TP degrees and block
sizes may differ; of heads that several sources hold (few KV heads, MLA) one source is read.

A *unit* is one kernel block of the source: for each layer the pieces that one unit takes have the
same size, so two tables and two arrays of indices say all of a read. Units land in the order in
which the source has them; `landing` brings them into the order of a page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvferry.device.base import SKIP
from kvferry.errors import IncompatibleError, UnavailableError
from kvferry.layout import Region
from kvferry.transfer.base import Stride
from kvferry.transfer.topology import GroupLayout, RankLayout

PIECE_BYTES_MIN = 4096
"""A smaller piece is not worth a descriptor of its own: what lies between is read as well."""
SURPLUS_MAX = 8
"""But not more than so many times what is wanted."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one unit of one layer takes: pieces of `piece_bytes` at `offsets` from its start in the
    source. They land one after the other, which gives the strides named here."""

    piece_bytes: int
    offsets: tuple[int, ...]
    head_stride_bytes: int
    token_stride_bytes: int

    @property
    def cell_bytes(self) -> int:
        return self.piece_bytes * len(self.offsets)


@dataclass(frozen=True)
class Lane:
    """See the module. `source` and `target`: the same layers in the target's order, narrowed to
    the heads that they share, `first_head` of the model and those after it."""

    source_rank: int
    source_group: int
    target_group: int
    source_block_tokens: int
    target_block_tokens: int
    is_opaque: bool
    first_head: int
    source: tuple[Region, ...]
    target: tuple[Region, ...]

    @property
    def unit_tokens(self) -> int:
        return self.source_block_tokens // self.source[0].kernel_blocks

    @property
    def head_count(self) -> int:
        return self.source[0].head_count

    @property
    def unit_count(self) -> int:
        """Units that the source has."""
        return self.source[0].block_count * self.source[0].kernel_blocks

    @cached_property
    def step_tokens(self) -> int:
        """The smallest chunk of tokens that is whole blocks on both sides."""
        return math.lcm(self.unit_tokens, self.target_block_tokens)

    @cached_property
    def cell(self) -> Cell:
        return cell_of(self.source[0])

    @cached_property
    def is_packed(self) -> bool:
        """All layers of a unit lie side by side, in order, and are one piece."""
        return is_packed(self.source)

    def source_strides(self) -> list[Stride]:
        """The table of the source: for each piece of a unit, that piece of all its units."""
        step, count = self.source[0].block_stride_bytes, self.unit_count
        if self.is_packed:
            row_bytes = len(self.source) * self.cell.piece_bytes
            return [Stride(self.source[0].base_address, row_bytes, step, count)]
        return [
            Stride(region.base_address + offset, self.cell.piece_bytes, step, count)
            for region in self.source
            for offset in self.cell.offsets
        ]


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk of tokens through one lane.

    `units`: of the source, in the order of their tokens. `places`: for each unit of the chunk its
    place in `units`; those that nobody wants repeat one that is there. `blocks`: of the target.
    """

    units: tuple[int, ...]
    places: tuple[int, ...]
    blocks: tuple[int, ...]


def cell_of(region: Region) -> Cell:
    """How one unit of one layer is cut into pieces."""
    dimensions = [
        (region.head_stride_bytes, region.head_count),
        (region.token_stride_bytes, region.block_tokens),
    ]
    piece, outer = region.content_bytes, []
    for stride, count in sorted(pair for pair in dimensions if pair[1] > 1):
        if not outer and stride == piece:
            piece *= count
        else:
            outer.append((stride, count))
    span = region.content_bytes + sum((count - 1) * stride for stride, count in dimensions)
    wanted = region.content_bytes * region.head_count * region.block_tokens
    if not outer or (piece < PIECE_BYTES_MIN and span <= SURPLUS_MAX * wanted):
        return Cell(span, (0,), region.head_stride_bytes, region.token_stride_bytes)
    landed, offsets, width = {}, [0], piece
    for stride, count in outer:
        offsets = [index * stride + offset for index in range(count) for offset in offsets]
        landed[stride], width = width, width * count
    head, token = (landed.get(stride, stride) for stride, _ in dimensions)
    return Cell(piece, tuple(offsets), head, token)


def is_packed(regions: Sequence[Region]) -> bool:
    """Each layer's part of a unit is one piece, and those of all layers lie side by side."""
    cell, first = cell_of(regions[0]), regions[0].base_address
    return len(cell.offsets) == 1 and all(
        region.base_address == first + index * cell.piece_bytes
        for index, region in enumerate(regions)
    )


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """One chunk of tokens through one lane, as a page that the source writes. `chunk`: its number;
    tokens [start, end) of it are wanted. `blocks`: of the target, all of the chunk."""

    chunk: int
    start_token: int
    end_token: int
    blocks: tuple[int, ...]


def lanes(target: RankLayout, sources: Sequence[RankLayout]) -> list[Lane]:
    """All lanes to one rank. Raises IncompatibleError if they do not bring all that it has."""
    return [
        lane
        for index, group in enumerate(target.groups)
        for lane in _group_lanes(target.rank, index, group, sources)
    ]


def readers(targets: Sequence[RankLayout], sources: Sequence[RankLayout]) -> dict[int, list[int]]:
    """By source rank, the target ranks that attend to it: those that read from it, or one that
    only says when all is done. Each source is released when all of its readers have done so."""
    found: dict[int, list[int]] = {source.rank: [] for source in sources}
    for target in targets:
        for rank in {lane.source_rank for lane in lanes(target, sources)}:
            found[rank].append(target.rank)
    for position, rank in enumerate(sorted(found)):
        if not found[rank]:
            found[rank].append(targets[position % len(targets)].rank)
    return found


def _group_lanes(
    rank: int, index: int, group: GroupLayout, sources: Sequence[RankLayout]
) -> Iterable[Lane]:
    parts: dict[tuple, list[tuple[Region, Region]]] = {}
    for region in group.regions:
        for source, number, heads in _sources_of(rank, region, group, sources):
            theirs = source.groups[number]
            found = _region_named(theirs, region.layer)
            _check_match(region, group, found, theirs)
            pair = (
                _narrow(found, theirs.first_head, heads),
                _narrow(region, group.first_head, heads),
            )
            shape = (
                replace(pair[0], layer="", base_address=0),
                replace(pair[1], layer="", base_address=0),
            )
            key = (source.rank, number, theirs.block_tokens, heads.start, shape)
            parts.setdefault(key, []).append(pair)
    for (source_rank, number, block_tokens, first_head, _), pairs in parts.items():
        yield Lane(
            source_rank,
            number,
            index,
            block_tokens,
            group.block_tokens,
            group.is_opaque,
            first_head,
            tuple(source for source, _ in pairs),
            tuple(mine for _, mine in pairs),
        )


def _sources_of(
    rank: int, region: Region, group: GroupLayout, sources: Sequence[RankLayout]
) -> list[tuple[RankLayout, int, range]]:
    """Which source serves which heads of one layer."""
    holders = [
        (source, number)
        for source in sorted(sources, key=lambda source: source.rank)
        for number, theirs in enumerate(source.groups)
        if _region_named(theirs, region.layer) is not None
    ]
    chosen: list[tuple[RankLayout, int, range]] = []
    for head in group.heads:
        able = [(s, n) for s, n in holders if head in s.groups[n].heads]
        if not able:
            raise IncompatibleError(
                "transfer.layer", f"no rank of the peer holds head {head} of layer {region.layer}"
            )
        source, number = able[rank % len(able)]
        if chosen and chosen[-1][:2] == (source, number):
            source, number, heads = chosen.pop()
            chosen.append((source, number, range(heads.start, head + 1)))
        else:
            chosen.append((source, number, range(head, head + 1)))
    return chosen


def _region_named(group: GroupLayout, layer: str) -> Region | None:
    return next((region for region in group.regions if region.layer == layer), None)


def _narrow(region: Region, first_head: int, heads: range) -> Region:
    skipped_bytes = (heads.start - first_head) * region.head_stride_bytes
    return replace(region, base_address=region.base_address + skipped_bytes, head_count=len(heads))


def _check_match(mine: Region, group: GroupLayout, theirs: Region, peer: GroupLayout) -> None:
    """The same bytes mean the same on both sides. Raises IncompatibleError naming what differs."""
    facts = {
        "model_heads": (group.model_heads, peer.model_heads),
        "is_opaque": (group.is_opaque, peer.is_opaque),
        "content_bytes": (mine.content_bytes, theirs.content_bytes),
    }
    if group.is_opaque:
        facts["block_tokens"] = (group.block_tokens, peer.block_tokens)
        facts["kernel_blocks"] = (mine.kernel_blocks, theirs.kernel_blocks)
    differing = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
    if differing:
        raise IncompatibleError(
            "transfer.layer",
            f"the peer's cache of layer {mine.layer} cannot be read: {', '.join(differing)}"
            " (ours, theirs)",
            **differing,
        )


def chunk_reads(
    lane: Lane,
    chunk_tokens: int,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    tokens: range,
) -> list[ChunkRead]:
    """What to read so that the target's blocks of these tokens are filled.

    `chunk_tokens`: a multiple of `lane.step_tokens`. `tokens`: starts with a target's block.
    Blocks that are SKIP are not wanted (target) or not there (source). Raises UnavailableError if
    a block that is wanted is not there.
    """
    first = tokens.start // chunk_tokens * chunk_tokens
    reads = [
        _chunk_read(lane, range(start, start + chunk_tokens), source_blocks, target_blocks, tokens)
        for start in range(first, tokens.stop, chunk_tokens)
    ]
    return [read for read in reads if read.units]


def chunk_writes(
    lane: Lane, chunk_tokens: int, target_blocks: Sequence[int], tokens: range
) -> list[ChunkWrite]:
    """As `chunk_reads`, of pages: what the source has, it knows itself. `chunk_tokens`: a multiple
    of the target's blocks."""
    first = tokens.start // chunk_tokens
    writes = []
    for number in range(first, -(-tokens.stop // chunk_tokens)):
        chunk = range(number * chunk_tokens, (number + 1) * chunk_tokens)
        blocks, wanted = _wanted(lane, chunk, target_blocks, tokens)
        if wanted:
            writes.append(ChunkWrite(number, wanted[0].start, wanted[-1].stop, tuple(blocks)))
    return writes


def _chunk_read(
    lane: Lane,
    chunk: range,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    tokens: range,
) -> ChunkRead:
    unit_width = lane.unit_tokens
    blocks, wanted = _wanted(lane, chunk, target_blocks, tokens)
    units = (range(part.start // unit_width, -(-part.stop // unit_width)) for part in wanted)
    order = sorted(set().union(*units))
    place = {unit: index for index, unit in enumerate(order)}
    first_unit = chunk.start // unit_width
    places = (place.get(first_unit + i, 0) for i in range(len(chunk) // unit_width))
    return ChunkRead(
        tuple(_source_unit(lane, source_blocks, unit) for unit in order),
        tuple(places),
        tuple(blocks),
    )


def _wanted(
    lane: Lane, chunk: range, target_blocks: Sequence[int], tokens: range
) -> tuple[list[int], list[range]]:
    """The target's blocks of a chunk, SKIP for those not wanted; the tokens of those wanted."""
    width = lane.target_block_tokens
    blocks, wanted = [], []
    for start in range(chunk.start, chunk.stop, width):
        end = min(start + width, tokens.stop)
        is_wanted = tokens.start <= start < end and target_blocks[start // width] != SKIP
        blocks.append(target_blocks[start // width] if is_wanted else SKIP)
        if is_wanted:
            wanted.append(range(start, end))
    return blocks, wanted


def _source_unit(lane: Lane, source_blocks: Sequence[int], unit: int) -> int:
    """The source's own number of the unit with these tokens."""
    per_block = lane.source[0].kernel_blocks
    index, rest = divmod(unit, per_block)
    block = source_blocks[index] if index < len(source_blocks) else SKIP
    if not 0 <= block < lane.source[0].block_count:
        raise UnavailableError(
            "transfer.block", f"the peer has no block for tokens from {unit * lane.unit_tokens} on"
        )
    return block * per_block + rest
