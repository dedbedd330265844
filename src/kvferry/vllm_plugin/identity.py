"""Who this rank is: for each cache group, what makes its bytes interchangeable, and where they lie.

Two engines share pages exactly if their records are equal: docs/formats.md says how a record
becomes a namespace. The degree of tensor parallelism is not in it, since a page holds all heads.
The block size is in it only where the backend packs whole blocks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.keys import Field, namespace_digest
from kvferry.layout import Placement, Region, default_chunk_tokens
from kvferry.offload.base import LocalPart, Part
from kvferry.vllm_plugin import versions
from kvferry.vllm_plugin.refusals import group_kind
from kvferry.vllm_plugin.regions import OPAQUE_BACKENDS, as_blocks, content_order, region

CHUNKS_PER_WINDOW_MIN = 2
"""A windowed group's chunk is at most half its window: the window before a boundary is what a hit
needs, and with larger chunks most of what is loaded would lie before it."""


@dataclass(frozen=True)
class Rank:
    """This rank among those of its engine."""

    index: int
    count: int
    stage: int
    stage_count: int
    tp_index: int
    tp_count: int


class Heads(NamedTuple):
    """KV heads of the whole model, of this rank, and how many ranks hold the same ones."""

    total: int
    local: int
    replica_count: int

    def placement(self, tp_index: int) -> Placement:
        return Placement(
            first_slice=tp_index // self.replica_count * self.local,
            slice_count=self.local,
            replica_index=tp_index % self.replica_count,
            replica_count=self.replica_count,
        )


class Layer(NamedTuple):
    """One layer of a group: where its cache is, and what of it belongs to the identity."""

    region: Region
    record: Mapping[str, Field]


def local_parts(
    config: Config,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    rank: Rank,
    model: Mapping[str, Field],
) -> tuple[LocalPart, ...]:
    """The parts of this rank, one for each cache group. `kv_caches`: tensors by layer, kept alive
    by the caller; `model`: from `weights.model_record`. Raises ConfigError."""
    return tuple(
        _local_part(config, vllm_config, kv_cache_config, kv_caches, rank, model, index)
        for index in range(len(kv_cache_config.kv_cache_groups))
    )


def _local_part(
    config: Config,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    rank: Rank,
    model: Mapping[str, Field],
    group_index: int,
) -> LocalPart:
    group = kv_cache_config.kv_cache_groups[group_index]
    spec = versions.layer_specs(group)[0]
    heads = heads_of(group, vllm_config.model_config, rank)
    window = spec.sliding_window if group_kind(group) == "sliding window" else None
    layers = layers_of(vllm_config, group, kv_cache_config.num_blocks, kv_caches, heads)
    block_tokens = group.kv_cache_spec.block_size
    block_head_bytes = sum(layer.region.block_head_bytes for layer in layers)
    chunk_tokens = chunk_tokens_of(
        config, block_tokens, block_head_bytes // block_tokens * rank.stage_count, window
    )
    group_record: dict[str, Field] = {
        "kind": group_kind(group),
        "window": window,
        "heads": heads.total,
        "layers": [layer.record for layer in layers],
    }
    record: dict[str, Field] = {**model, "group": group_record, "chunk_tokens": chunk_tokens}
    part = Part(
        stage=rank.stage,
        group_index=group_index,
        namespace=namespace_digest(record),
        group=int.from_bytes(namespace_digest({"group": group_record})[:4], "big"),
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        slice_count=heads.total,
        payload_bytes=chunk_tokens // block_tokens * block_head_bytes,
        description=describe(record),
        window_tokens=window,
    )
    regions = tuple(layer.region for layer in layers)
    return LocalPart(part=part, regions=regions, placement=heads.placement(rank.tp_index))


def heads_of(group: Any, model_config: Any, rank: Rank) -> Heads:
    """How the KV heads of a group are spread over the ranks of a stage."""
    if group_kind(group) == "MLA":
        return Heads(1, 1, rank.tp_count)
    local = versions.layer_specs(group)[0].num_kv_heads
    total = model_config.get_total_num_kv_heads() if rank.tp_count > 1 else local
    replica_count = max(1, rank.tp_count // total)
    if local * rank.tp_count != total * replica_count:
        raise ConfigError(
            "vllm.heads",
            f"layer {group.layer_names[0]} has {local} KV heads on each of {rank.tp_count} ranks,"
            f" the model has {total}: kvferry cannot tell which rank holds which",
        )
    return Heads(total, local, replica_count)


def chunk_tokens_of(
    config: Config, block_tokens: int, token_slice_bytes: int, window_tokens: int | None
) -> int:
    """Tokens in a chunk of one group. `token_slice_bytes`: one token of one head, all layers."""
    chunk = config.chunk_tokens or default_chunk_tokens(token_slice_bytes, block_tokens)
    if chunk % block_tokens:
        raise ConfigError(
            "config.wrong_value",
            f"chunk_tokens: expected a multiple of the block size {block_tokens}, got {chunk}",
            key="chunk_tokens",
        )
    limit = window_tokens // CHUNKS_PER_WINDOW_MIN if window_tokens else chunk
    while chunk > limit and chunk % (2 * block_tokens) == 0:
        chunk //= 2
    return chunk


def describe(record: Mapping[str, Field]) -> str:
    """The record as JSON, for people."""
    return json.dumps(record, default=lambda value: value.hex(), sort_keys=True)


def layers_of(
    vllm_config: Any,
    group: Any,
    block_count: int,
    kv_caches: Mapping[str, torch.Tensor],
    heads: Heads,
) -> list[Layer]:
    """The layers of a group that have a cache of their own, in the order of a page. Raises
    ConfigError."""
    modules = versions.attention_layers(vllm_config, group.layer_names)
    layers: dict[int, Layer] = {}
    for name in sorted(group.layer_names, key=natural):
        cache = as_blocks(name, kv_caches[name])
        if cache.data_ptr() not in layers:
            spec = versions.layer_spec(group.kv_cache_spec, name)
            layer = _layer(name, cache, block_count, spec, modules[name])
            _check(layer.region, cache, spec, heads)
            layers[cache.data_ptr()] = layer
    return list(layers.values())


def _layer(name: str, cache: torch.Tensor, block_count: int, spec: Any, module: Any) -> Layer:
    backend = module.get_attn_backend()
    is_opaque = backend.__name__ in OPAQUE_BACKENDS
    record: dict[str, Field] = {
        "name": name,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantisation": versions.quantisation(spec),
        "scales": _scales(spec, module),
        "head_size": spec.head_size,
        "content_bytes": cache.shape[3] * cache.element_size(),
        "order": content_order(backend, module, cache.shape[2]),
    }
    return Layer(region(name, cache, block_count, is_opaque), record)


def _scales(spec: Any, module: Any) -> list[str] | None:
    """Factors that turn quantised content into numbers, exactly."""
    if versions.quantisation(spec) == "NONE":
        return None
    return [float(getattr(module, f"_{name}_scale_float")).hex() for name in ("k", "v")]


def _check(found: Region, cache: torch.Tensor, spec: Any, heads: Heads) -> None:
    tokens = found.kernel_blocks * cache.shape[2]
    if found.head_count != heads.local or tokens != spec.block_size:
        raise ConfigError(
            "vllm.cache_shape",
            f"the KV cache of {found.layer} has {found.head_count} heads and {tokens} tokens in a"
            f" block, its specification {heads.local} and {spec.block_size}: this backend packs"
            " its cache in a way that kvferry does not know",
        )


def natural(name: str) -> Sequence[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [
        (int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)
    ]
