"""Where the KV cache lies: tensors as they arrive, to `layout.Region`. Strides are trusted, never
layout names, since the shape of a layer's cache and its order in memory have both changed.

A layer's cache is [kernel blocks, heads, tokens, content], in any order in memory; MLA before 0.30
has no dimension for heads. A block of the scheduler may be several kernel blocks, a page may be
padded, layers may lie between each other's blocks.

Most backends keep each token's content together, so a page can be read block by block of any size.
The CPU backend does not: within a head it stores K of the whole block, packed for the instruction
set, then V. Its part of a head in one block is opaque bytes.
"""

from typing import Any

import torch

from kvferry.errors import ConfigError
from kvferry.layout import Region
from kvferry.vllm_plugin import versions

# Classes whose content is, for each token and head, K then V (MLA: the latent).
PER_TOKEN_BACKENDS = frozenset(
    {
        "FlashAttentionBackend",
        "FlashInferBackend",
        "FlexAttentionBackend",
        "TritonAttentionBackend",
        "FlashAttnMLABackend",
        "FlashInferMLABackend",
        "FlashMLABackend",
        "CutlassMLABackend",
        "TritonMLABackend",
    }
)
OPAQUE_BACKENDS = frozenset({"CPUAttentionBackend"})


def content_order(backend: type, layer: Any, kernel_block_tokens: int) -> str:
    """How a backend orders the content of its cache: part of the identity. Raises ConfigError if
    the CPU backend does not say for which instruction set it packs."""
    name = backend.__name__
    if name in PER_TOKEN_BACKENDS:
        return "kv-per-token"
    if name not in OPAQUE_BACKENDS:
        return f"{name}:block{kernel_block_tokens}"
    isa = versions.instruction_set(layer)
    if not isa:
        raise ConfigError(
            "vllm.content_order",
            f"{name} does not say for which instruction set it packs the KV cache",
        )
    return f"cpu_attn:{isa}:block{kernel_block_tokens}"


def as_blocks(layer_name: str, cache: torch.Tensor) -> torch.Tensor:
    """[kernel blocks, heads, tokens, content]: the same memory. Raises ConfigError for shapes
    that are not known."""
    if cache.dim() == 3:
        cache = cache.unsqueeze(1)
    if cache.dim() != 4 or cache.stride(3) != 1:
        raise ConfigError(
            "vllm.cache_shape",
            f"the KV cache of {layer_name} has shape {tuple(cache.shape)} and strides"
            f" {cache.stride()}: kvferry knows [blocks, heads, tokens, content] with contiguous"
            " content only; try another --attention-backend",
        )
    return cache


def region(layer_name: str, cache: torch.Tensor, block_count: int, is_opaque: bool) -> Region:
    """One layer's cache. `cache`: from `as_blocks`; `block_count`: the scheduler's blocks.

    The caller keeps the tensor alive. Raises ConfigError if the shape contradicts this.
    """
    kernel_block_count, head_count, tokens, content = cache.shape
    item_bytes = cache.element_size()
    block_stride, head_stride, token_stride, _ = (step * item_bytes for step in cache.stride())
    content_bytes = content * item_bytes
    if kernel_block_count % block_count:
        raise _contradiction(layer_name, cache, f"are no multiple of {block_count} blocks")
    if is_opaque:
        if token_stride != content_bytes:
            raise _contradiction(layer_name, cache, "scatter what the backend packs")
        tokens, content_bytes = 1, tokens * content_bytes
        token_stride = content_bytes
    return Region(
        layer=layer_name,
        base_address=cache.data_ptr(),
        block_count=block_count,
        kernel_blocks=kernel_block_count // block_count,
        head_count=head_count,
        block_tokens=tokens,
        content_bytes=content_bytes,
        block_stride_bytes=block_stride,
        head_stride_bytes=head_stride,
        token_stride_bytes=token_stride,
    )


def _contradiction(layer_name: str, cache: torch.Tensor, words: str) -> ConfigError:
    return ConfigError(
        "vllm.cache_shape",
        f"the KV cache of {layer_name} cannot be read: its shape {tuple(cache.shape)} and strides"
        f" {cache.stride()} {words}",
    )
