"""Every token of every head goes where it belongs, whatever the two engines look like: one wrong
index is fluent wrong text."""

import ctypes
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.device.base import SKIP, Piece
from kvferry.errors import ConfigError, IncompatibleError, UnavailableError
from kvferry.layout import round_up
from kvferry.testing.clock import Chance
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.kv_memory import (
    EngineShape,
    GroupModel,
    draw_models,
    draw_shape,
    engine_memory,
    rank_layouts,
)
from kvferry.testing.staging import Buffer
from kvferry.transfer.base import Range
from kvferry.transfer.cut import cut_of, lane_geometry, source_of
from kvferry.transfer.landing import Landing
from kvferry.transfer.messages import Cut
from kvferry.transfer.plan import cell_of, chunk_reads, chunk_writes, lanes, readers
from kvferry.transfer.topology import RankLayout, check_layout

SLOT_BYTES = 16384
BLOCKS = 16


def pieces(strides):
    """What a link does with a table: each piece's address and size, by index."""
    return [
        (stride.address + index * stride.stride_bytes, stride.piece_bytes)
        for stride in strides
        for index in range(stride.count)
    ]


def pull(lane, sources, source_blocks, target_blocks, tokens):
    """One lane, by hand."""
    staging = Buffer(4 * SLOT_BYTES)
    landing = Landing(lane, Range(staging.address, staging.length_bytes), SLOT_BYTES)
    page = Buffer(round_up(landing.geometry.page_bytes, 4096))
    gatherer = ReferenceCopier(landing.regions(), landing.geometry)
    scatterer = ReferenceCopier(lane.target, landing.geometry)
    sources, targets = pieces(lane.source_strides()), pieces(landing.strides())
    reads = chunk_reads(lane, landing.chunk_tokens, source_blocks, target_blocks, tokens)
    for number, read in enumerate(reads):
        slot = staging.address + number % 4 * SLOT_BYTES
        for here, there in zip(*landing.indices(read, slot), strict=True):
            (target, size), (source, source_size) = targets[here], sources[there]
            assert size == source_size
            assert slot <= target and target + size <= slot + SLOT_BYTES
            ctypes.memmove(target, source, size)
        gatherer.submit_gather([landing.gather(read, slot, page.address)])
        gatherer.poll()
        scatterer.submit_scatter([Piece(read.blocks, page.address)])
        scatterer.poll()


def push(lane, sources, source_blocks, target_blocks, tokens):
    """As `pull`, by pages that the source gathers, with what it knows of itself."""
    cut = cut_of(lane, 4 * SLOT_BYTES, 8)
    group, regions, geometry = source_of(sources[lane.source_rank], cut)
    assert geometry == lane_geometry(lane, cut)
    page = Buffer(geometry.page_bytes)
    gatherer = ReferenceCopier(regions, geometry)
    scatterer = ReferenceCopier(lane.target, geometry)
    for write in chunk_writes(lane, cut.chunk_tokens, target_blocks, tokens):
        first = write.chunk * cut.chunk_tokens // group.block_tokens
        last = len(source_blocks) - 1
        chunk = range(first, first + cut.chunk_tokens // group.block_tokens)
        blocks = tuple(source_blocks[min(index, last)] for index in chunk)
        gatherer.submit_gather([Piece(blocks, page.address)])
        gatherer.poll()
        scatterer.submit_scatter([Piece(write.blocks, page.address)])
        scatterer.poll()


class Pair:
    """Two engines with one model; the source holds a request, the target wants it."""

    def __init__(self, seed):
        chance = self.chance = Chance(seed)
        models, opaque_tokens = draw_models(chance), chance.choice([2, 4])
        self.source_shape = draw_shape(chance, models, opaque_tokens, BLOCKS)
        self.target_shape = draw_shape(chance, models, opaque_tokens, BLOCKS)
        self.source = engine_memory(models, self.source_shape)
        self.target = engine_memory(models, self.target_shape)
        self.token_count = chance.randint(1, 2 * BLOCKS)
        self.source_tables = self.tables(self.source_shape)
        self.target_tables = self.tables(self.target_shape)

    def tables(self, shape):
        return [
            self.chance.sample(range(BLOCKS), -(-self.token_count // tokens))
            for tokens in shape.block_tokens
        ]

    def fill(self):
        for groups in self.source:
            for number, group in enumerate(groups):
                for index, block in enumerate(self.source_tables[number]):
                    group.write(block, index, "text")
        for groups in self.target:
            for group in groups:
                for block in range(BLOCKS):
                    group.spoil(block)

    def layouts(self):
        return rank_layouts(self.source), rank_layouts(self.target)


@pytest.mark.parametrize("move", [pull, push])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_was_at_the_source_is_at_the_target(move, seed):
    pair = Pair(seed)
    pair.fill()
    sources, targets = pair.layouts()
    for target, groups in zip(targets, pair.target, strict=True):
        starts = [pair.chance.randrange(0, pair.token_count, g.block_tokens) for g in groups]
        found = lanes(target, sources)
        for lane in found:
            tokens = range(starts[lane.target_group], pair.token_count)
            move(
                lane,
                sources,
                pair.source_tables[lane.source_group],
                pair.target_tables[lane.target_group],
                tokens,
            )
        for number, group in enumerate(groups):
            for index, block in enumerate(pair.target_tables[number]):
                is_read = index * group.block_tokens >= starts[number]
                assert group.holds(block, index, "text", pair.token_count) == is_read


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_source_is_released_by_those_that_read_it(seed):
    sources, targets = Pair(seed).layouts()
    found = readers(targets, sources)
    assert found.keys() == {source.rank for source in sources}
    for target in targets:
        for lane in lanes(target, sources):
            assert target.rank in found[lane.source_rank]
    assert all(len(ranks) == len(set(ranks)) >= 1 for ranks in found.values())


def shape(rank_count=1, block_tokens=4, order="LBHN", kernel_blocks=1):
    return EngineShape(rank_count, (block_tokens,), (kernel_blocks,), (order,), BLOCKS)


def layouts_of(model, engine):
    return rank_layouts(engine_memory([model], engine))


def test_a_head_is_read_once_and_replicas_share_the_readers():
    """Reading latent attention from all ranks would multiply the bytes by the TP degree."""
    latent = GroupModel(("layer",), 1)
    sources = layouts_of(latent, shape(4))
    targets = layouts_of(latent, shape(4))
    assert [lane.source_rank for target in targets for lane in lanes(target, sources)] == [
        0,
        1,
        2,
        3,
    ]
    (alone,) = layouts_of(latent, shape(1))
    assert [lane.source_rank for lane in lanes(alone, sources)] == [0]
    assert readers([alone], sources) == {rank: [0] for rank in range(4)}


@pytest.mark.parametrize("order", ["BLHN", "BLNH"])
def test_a_packed_block_is_one_piece(order):
    """One descriptor for a block of all layers, where the engine packs them: 30 times fewer."""
    model = GroupModel(("a", "b", "c"), 2)
    (target,) = layouts_of(model, shape())
    (lane,) = lanes(target, layouts_of(model, shape(order=order)))
    assert len(lane.source_strides()) == 1


@pytest.mark.parametrize("order", ["LBHN", "BLHN"])
def test_neighbours_stay_neighbours(order):
    """A transport merges pieces that follow each other on both sides: consecutive blocks of a
    request must land so."""
    model = GroupModel(("a", "b"), 2)
    (target,) = layouts_of(model, shape())
    (lane,) = lanes(target, layouts_of(model, shape(order=order)))
    landing = Landing(lane, Range(1 << 20, 1 << 20), SLOT_BYTES)
    blocks = list(range(3, 9))
    (read,) = chunk_reads(lane, landing.chunk_tokens, blocks, blocks, range(24))
    target_pieces, source_pieces = pieces(landing.strides()), pieces(lane.source_strides())
    target_indices, source_indices = landing.indices(read, 1 << 20)
    breaks = 0
    for (a, b), (c, d) in zip(pairwise(target_indices), pairwise(source_indices), strict=True):
        is_run = sum(target_pieces[a]) == target_pieces[b][0]
        is_run = is_run and sum(source_pieces[c]) == source_pieces[d][0]
        breaks += not is_run
    assert breaks == len(lane.source_strides()) - 1


def test_small_pieces_are_read_with_what_lies_between():
    """Descriptors of a few hundred bytes are slower than a few surplus bytes."""
    model = GroupModel(("a",), 4)
    (source,) = layouts_of(model, shape(order="LBNH"))
    region = source.groups[0].regions[0]
    half = replace(region, head_count=2)
    assert len(cell_of(half).offsets) == 1
    large = replace(half, content_bytes=4096, token_stride_bytes=4 * 4096, head_stride_bytes=4096)
    assert len(cell_of(large).offsets) == 4
    assert cell_of(large).cell_bytes == 2 * 4 * 4096


def test_a_window_is_read_without_what_was_before_it():
    model = GroupModel(("a",), 1)
    (target,) = layouts_of(model, shape())
    (lane,) = lanes(target, layouts_of(model, shape(block_tokens=8)))
    target_blocks = [SKIP, SKIP, 5, 6]
    (read,) = chunk_reads(lane, 64, [SKIP, 3], target_blocks, range(16))
    assert read.units == (3,)
    assert read.blocks[:4] == (SKIP, SKIP, 5, 6)


def test_tokens_that_the_source_has_dropped_are_no_read():
    """Taking some other block in their place would be wrong text."""
    model = GroupModel(("a",), 1)
    (target,) = layouts_of(model, shape())
    (lane,) = lanes(target, layouts_of(model, shape()))
    for source_blocks in ([SKIP, 3], [3], [3, BLOCKS]):
        with pytest.raises(UnavailableError):
            chunk_reads(lane, 64, source_blocks, [1, 2], range(8))


def test_what_differs_is_named():
    model, other = GroupModel(("a",), 2), GroupModel(("b",), 2)
    (target,) = layouts_of(model, shape())
    with pytest.raises(IncompatibleError, match="layer a"):
        lanes(target, layouts_of(other, shape()))
    with pytest.raises(IncompatibleError, match="head 1"):
        lanes(target, layouts_of(model, shape(2))[:1])
    with pytest.raises(IncompatibleError, match="model_heads"):
        lanes(target, layouts_of(GroupModel(("a",), 4), shape()))
    opaque = GroupModel(("a",), 2, is_opaque=True)
    (target,) = layouts_of(opaque, shape())
    with pytest.raises(IncompatibleError, match="block_tokens"):
        lanes(target, layouts_of(opaque, shape(block_tokens=8)))


def test_a_slot_that_is_too_small_says_how_large_it_must_be():
    model = GroupModel(("a", "b"), 2)
    (target,) = layouts_of(model, shape())
    (lane,) = lanes(target, layouts_of(model, shape()))
    with pytest.raises(ConfigError, match="slot_bytes") as refused:
        Landing(lane, Range(4096, 1 << 20), 100)
    needed = int(refused.value.message.rsplit(" ", 1)[1])
    assert Landing(lane, Range(4096, 1 << 20), needed).chunk_tokens == 4


REGION_LIES = [
    {"head_count": 3},
    {"block_count": 0},
    {"block_count": 1 << 40},
    {"content_bytes": -8},
    {"block_stride_bytes": 0},
    {"base_address": -1},
    {"block_tokens": 3},
    {"kernel_blocks": 2},
]


@pytest.mark.parametrize("lie", REGION_LIES, ids=str)
def test_a_layout_that_cannot_be_is_refused(lie):
    """It comes from a peer: with it the plan would loop, divide by zero or address nothing."""
    (honest,) = layouts_of(GroupModel(("a", "b"), 2), shape())
    check_layout(honest)
    group = honest.groups[0]
    regions = (group.regions[0], replace(group.regions[1], **lie))
    lying = RankLayout(
        0, (type(group)(group.block_tokens, group.first_head, group.model_heads, False, regions),)
    )
    with pytest.raises(IncompatibleError):
        check_layout(lying)


def test_a_reader_gets_no_pages_of_what_is_not_here():
    """Whatever a peer asks for, nothing beside this rank's own heads and layers is gathered."""
    memory = engine_memory((GroupModel(("a", "b"), 2),), EngineShape(2, (4,), (1,), ("LBHN",), 8))
    layout = rank_layouts(memory)[1]
    assert source_of(layout, Cut(0, ("a",), 1, 1, 8))
    for cut in (
        Cut(1, ("a",), 1, 1, 8),
        Cut(-1, ("a",), 1, 1, 8),
        Cut(0, (), 1, 1, 8),
        Cut(0, ("c",), 1, 1, 8),
        Cut(0, ("a",), 0, 1, 8),
        Cut(0, ("a",), 1, 2, 8),
        Cut(0, ("a",), 1, 0, 8),
        Cut(0, ("a",), 1, 1, 6),
        Cut(0, ("a",), 1, 1, 0),
    ):
        with pytest.raises(IncompatibleError):
            source_of(layout, cut)
