"""How this rank's KV cache looks to peers, and what must be equal in both engines.

Degrees of tensor parallelism, block sizes and orders in memory may differ; they are in the layout,
not in the fields. Layers that are alike share fields, so that a refusal has one line for what
differs in all of them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.keys import Field, namespace_digest
from kvferry.transfer.base import Range
from kvferry.transfer.topology import GroupLayout, RankLayout
from kvferry.vllm_plugin import versions
from kvferry.vllm_plugin.identity import Layer, Rank, describe, heads_of, layers_of, natural
from kvferry.vllm_plugin.pd.messages import Fields
from kvferry.vllm_plugin.refusals import group_kind
from kvferry.vllm_plugin.regions import OPAQUE_BACKENDS


class RankIdentity(NamedTuple):
    """`fields`, `namespace`: see `messages.Ready`."""

    layout: RankLayout
    fields: Fields
    namespace: bytes


class _Kind(NamedTuple):
    """What layers have in common that are alike, and their names."""

    record: dict[str, Field]
    names: list[str]


def rank_identity(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    rank: Rank,
    model: Mapping[str, Field],
) -> RankIdentity:
    """`kv_caches`: tensors by layer, kept alive by the caller; `model`: from
    `weights.model_record`. Raises ConfigError."""
    groups, kinds = [], {}
    for group in kv_cache_config.kv_cache_groups:
        heads = heads_of(group, vllm_config.model_config, rank)
        layers = layers_of(vllm_config, group, kv_cache_config.num_blocks, kv_caches, heads)
        for layer in layers:
            _sort_in(kinds, group, heads.total, layer)
        groups.append(
            GroupLayout(
                block_tokens=group.kv_cache_spec.block_size,
                first_head=heads.placement(rank.tp_index).first_slice,
                model_heads=heads.total,
                is_opaque=_is_opaque(vllm_config, group),
                regions=tuple(layer.region for layer in layers),
            )
        )
    fields: Fields = {name: _readable(value) for name, value in model.items()}
    fields |= dict(_layer_fields(list(kinds.values())))
    namespace = namespace_digest({"transfer": dict(model)})
    return RankIdentity(RankLayout(rank.index, tuple(groups)), fields, namespace)


def storages(kv_caches: Mapping[str, torch.Tensor]) -> list[Range]:
    """The allocations in which these tensors lie: few and large."""
    found = {}
    for cache in kv_caches.values():
        storage = cache.untyped_storage()
        found[storage.data_ptr()] = Range(storage.data_ptr(), storage.nbytes())
    return list(found.values())


def _is_opaque(vllm_config: Any, group: Any) -> bool:
    modules = versions.attention_layers(vllm_config, group.layer_names)
    backends = {module.get_attn_backend().__name__ for module in modules.values()}
    return not backends.isdisjoint(OPAQUE_BACKENDS)


def _sort_in(kinds: dict[str, _Kind], group: Any, head_count: int, layer: Layer) -> None:
    spec = versions.layer_specs(group)[0]
    record = {name: value for name, value in layer.record.items() if name != "name"}
    record |= {
        "kind": group_kind(group),
        "window": getattr(spec, "sliding_window", None),
        "heads": head_count,
    }
    kinds.setdefault(describe(record), _Kind(record, [])).names.append(layer.region.layer)


def _layer_fields(kinds: Sequence[_Kind]) -> Iterator[tuple[str, str | int | bool]]:
    """Numbered by the first layer of each kind."""
    for kind in kinds:
        kind.names.sort(key=natural)
    for number, kind in enumerate(sorted(kinds, key=lambda kind: natural(kind.names[0]))):
        yield f"layers[{number}].names", _summary(kind.names)
        for name, value in kind.record.items():
            yield f"layers[{number}].{name}", _readable(value)


def _summary(names: Sequence[str]) -> str:
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    return f"{len(names)} from {names[0]} to {names[-1]} ({digest})"


def _readable(value: Field) -> str | int | bool:
    if isinstance(value, str | int):
        return value
    return describe({"": value}).removeprefix('{"": ').removesuffix("}")
