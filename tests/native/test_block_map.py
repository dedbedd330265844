"""Gather and scatter: a byte in the wrong place is another answer under the right key."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import _native

from .buffers import Buffer
from .copy_model import BLOCK_COUNT, HEADER_BYTES, Engine, Shape, engines, noise

blocks_lists = st.lists(st.integers(0, BLOCK_COUNT - 1), max_size=BLOCK_COUNT, unique=True)


@settings(max_examples=300, deadline=None)
@given(engines(), blocks_lists, st.sampled_from([0, 1, 100]))
def test_a_page_holds_the_blocks_in_canonical_order(engine, blocks, padding_bytes):
    slice_bytes = engine.slice_bytes(blocks, padding_bytes)
    memory = noise(engine.memory_bytes, 1)
    extent = noise(engine.head_count * slice_bytes, 2)
    expected = engine.gathered(memory.view, extent.view, blocks, slice_bytes)
    engine.block_map(memory, slice_bytes).gather(blocks, extent.address)
    assert extent.view == expected


@settings(max_examples=300, deadline=None)
@given(engines(), blocks_lists, st.sets(st.integers(0, BLOCK_COUNT - 1)))
def test_a_load_fills_its_blocks_and_no_other_byte(engine, blocks, skipped):
    blocks = [-1 if block in skipped else block for block in blocks]
    slice_bytes = engine.slice_bytes(blocks, 16)
    memory = noise(engine.memory_bytes, 1)
    extent = noise(engine.head_count * slice_bytes, 2)
    expected = engine.scattered(memory.view, extent.view, blocks, slice_bytes)
    engine.block_map(memory, slice_bytes).scatter(blocks, extent.address)
    assert memory.view == expected


ONE_LAYER = Engine((Shape(0, 1, 1, 64, 64, 64, 64),), 1, 64 * BLOCK_COUNT)


def test_a_gather_with_a_hole_is_refused():
    memory, extent = Buffer(ONE_LAYER.memory_bytes), Buffer(4096)
    block_map = ONE_LAYER.block_map(memory, 4096)
    with pytest.raises(ValueError, match="skip"):
        block_map.gather([0, -1], extent.address)
    pool = _native.CopyPool(1)
    with pytest.raises(ValueError, match="skip"):
        pool.submit(block_map, True, [([0], extent.address), ([-1], extent.address)])
    pool.close()


def test_more_blocks_than_a_slice_holds_are_refused():
    memory, extent = Buffer(ONE_LAYER.memory_bytes), Buffer(4096)
    block_map = ONE_LAYER.block_map(memory, HEADER_BYTES + 2 * 64 + 63)
    block_map.gather([0, 1], extent.address)
    pool = _native.CopyPool(1)
    for copy in (
        block_map.gather,
        block_map.scatter,
        lambda blocks, address: pool.submit(block_map, False, [(blocks, address)]),
    ):
        with pytest.raises(ValueError, match="3 blocks"):
            copy([0, 1, 2], extent.address)
    pool.close()


@pytest.mark.parametrize(
    ("layer", "header_bytes", "slice_bytes"),
    [((0, 1, 1, 0, 64, 64, 64), 64, 4096), ((0, 1, 1, 64, 64, 64, 64), 4097, 4096)],
)
def test_sizes_that_cannot_be_are_refused(layer, header_bytes, slice_bytes):
    with pytest.raises(ValueError):
        _native.BlockMap([layer], 1, header_bytes, slice_bytes)
