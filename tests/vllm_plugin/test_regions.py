"""If a region named other bytes than the layer's, every page would be wrong with a valid checksum.

Each case lays the same content [block, head, token, content] out differently in memory and reads
it back through the region's own arithmetic.
"""

import ctypes

import pytest
import torch

from kvferry.errors import ConfigError
from kvferry.layout import Region
from kvferry.vllm_plugin.regions import as_blocks, content_order, region

BLOCKS, HEADS, TOKENS, CONTENT = 3, 2, 4, 8


def content(blocks: int = BLOCKS, tokens: int = TOKENS) -> torch.Tensor:
    """[block, head, token, content], no two elements equal."""
    shape = (blocks, HEADS, tokens, CONTENT)
    return torch.arange(blocks * HEADS * tokens * CONTENT, dtype=torch.float32).view(shape)


def in_memory_order(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, laid out outermost first in `order`."""
    inverse = [order.index(axis) for axis in range(4)]
    return values.permute(order).contiguous().permute(inverse)


def read(found: Region, block: int, head: int) -> bytes:
    """What a copier reads for one head of one scheduler block: the formula of `layout.Region`."""
    pieces = []
    for kernel in range(block * found.kernel_blocks, (block + 1) * found.kernel_blocks):
        for token in range(found.block_tokens):
            address = (
                found.base_address
                + kernel * found.block_stride_bytes
                + head * found.head_stride_bytes
                + token * found.token_stride_bytes
            )
            pieces.append(ctypes.string_at(address, found.content_bytes))
    return b"".join(pieces)


def assert_reads(found: Region, values: torch.Tensor) -> None:
    for block in range(BLOCKS):
        for head in range(HEADS):
            expected = values[block, head].contiguous().numpy().tobytes()
            assert read(found, block, head) == expected


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)], ids=["BHNC", "BNHC", "HBNC"]
)
def test_any_order_in_memory(order):
    values = content()
    cache = in_memory_order(values, order)

    assert_reads(region("layer", as_blocks("layer", cache), BLOCKS, is_opaque=False), values)


def test_layers_between_each_others_blocks():
    values = content()
    packed = torch.zeros(BLOCKS, 5, HEADS, TOKENS, CONTENT)
    packed[:, 3] = values

    assert_reads(region("layer", as_blocks("layer", packed[:, 3]), BLOCKS, False), values)


def test_padded_pages():
    values = content()
    padded = torch.zeros(BLOCKS, HEADS * TOKENS * CONTENT + 24)
    cache = padded.as_strided(values.shape, (padded.stride(0), TOKENS * CONTENT, CONTENT, 1))
    cache.copy_(values)

    assert_reads(region("layer", as_blocks("layer", cache), BLOCKS, False), values)


def test_kernel_blocks_smaller_than_the_schedulers():
    kernel = content(blocks=2 * BLOCKS, tokens=TOKENS // 2)
    values = kernel.view(BLOCKS, 2, HEADS, TOKENS // 2, CONTENT).transpose(1, 2)
    values = values.reshape(BLOCKS, HEADS, TOKENS, CONTENT)

    found = region("layer", as_blocks("layer", kernel), BLOCKS, is_opaque=False)

    assert found.kernel_blocks == 2
    assert_reads(found, values)


def test_mla_without_a_dimension_for_heads():
    values = content()[:, :1]
    found = region("layer", as_blocks("layer", values[:, 0].contiguous()), BLOCKS, False)

    assert found.head_count == 1
    assert read(found, 2, 0) == values[2, 0].contiguous().numpy().tobytes()


def test_opaque_blocks_are_read_whole():
    values = content()
    found = region("layer", as_blocks("layer", values), BLOCKS, is_opaque=True)

    assert (found.block_tokens, found.content_bytes) == (1, TOKENS * CONTENT * 4)
    assert_reads(found, values)


def test_a_packing_backend_with_scattered_heads_is_refused():
    cache = in_memory_order(content(), (0, 2, 1, 3))

    with pytest.raises(ConfigError, match="scatter"):
        region("layer", as_blocks("layer", cache), BLOCKS, is_opaque=True)


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT), content().transpose(2, 3)],
    ids=["five dimensions", "content not contiguous"],
)
def test_unknown_shapes_are_refused(cache):
    with pytest.raises(ConfigError, match="shape"):
        as_blocks("layer", cache)


class FlashAttentionBackend:
    pass


class CPUAttentionBackend:
    pass


class SomeBackend:
    pass


class Layer:
    isa = "vec"


def test_blocks_of_another_size_are_other_bytes_only_where_the_backend_packs():
    assert content_order(FlashAttentionBackend, Layer, 16) == content_order(
        FlashAttentionBackend, Layer, 64
    )
    for backend in (CPUAttentionBackend, SomeBackend):
        assert content_order(backend, Layer, 32) != content_order(backend, Layer, 64)


class OlderLayer:
    """vLLM before 0.29: its implementation knows."""

    impl = Layer


def test_the_instruction_set_is_found_where_older_versions_keep_it():
    older, newer = (content_order(CPUAttentionBackend, layer, 32) for layer in (OlderLayer, Layer))
    assert older == newer


def test_an_unnamed_instruction_set_is_refused():
    with pytest.raises(ConfigError, match="instruction set"):
        content_order(CPUAttentionBackend, object(), 32)
