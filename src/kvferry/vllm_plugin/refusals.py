"""What cannot be shared safely, or is not tested yet: refused at start, with the reason and what
to change. Nothing here degrades silently."""

from collections.abc import Callable, Iterator
from typing import Any

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.vllm_plugin import versions

GROUP_KINDS = {
    "FullAttentionSpec": "full attention",
    "SlidingWindowSpec": "sliding window",
    "MLAAttentionSpec": "MLA",
}
"""Classes of cache group specs, exactly: a subclass may store something else."""

QUANTISATIONS = ("NONE", "FP8_PER_TENSOR")
SPECULATIONS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")

Reasons = Callable[[], Iterator[str]]

FAILURE_POLICY_LINE = '"kv_load_failure_policy": "recompute"'


def check(config: Config, vllm_config: Any, kv_cache_config: Any, version: tuple[int, int]) -> None:
    """Raises ConfigError for the first thing that is refused."""
    refuse(
        lambda: _role(vllm_config.kv_transfer_config),
        lambda: failure_policy(
            config, vllm_config.kv_transfer_config, "a page that cannot be read"
        ),
        *of_engine(config, vllm_config, kv_cache_config, version),
    )


def of_engine(
    config: Any, vllm_config: Any, kv_cache_config: Any, version: tuple[int, int]
) -> list[Reasons]:
    """What both connectors refuse. `config`: with `allow_weight_updates`."""
    return [
        lambda: _weight_updates(config, vllm_config),
        lambda: _parallelism(vllm_config.parallel_config),
        lambda: _engine(vllm_config),
        lambda: _groups(kv_cache_config.kv_cache_groups, version),
    ]


def refuse(*reasons: Reasons) -> None:
    """Raises ConfigError for the first reason that there is."""
    for reason in reasons:
        for message in reason():
            raise ConfigError("vllm.refused", message)


def check_memory(device_types: set[str]) -> None:
    """Raises ConfigError where the KV cache lies in memory that no copier reaches."""
    for device_type in sorted(device_types - {"cpu", "cuda"}):
        raise ConfigError(
            "vllm.refused",
            f"the KV cache lies in {device_type} memory: kvferry copies the memory of NVIDIA GPUs"
            " and of CPUs only; run vLLM without kvferry",
        )
    if len(device_types) > 1:
        raise ConfigError(
            "vllm.refused", "the KV cache lies in CPU and GPU memory at once: not supported"
        )


def group_kind(group: Any) -> str | None:
    """The one kind of all layers of a cache group; None if it is not supported."""
    kinds = {GROUP_KINDS.get(type(spec).__name__) for spec in versions.layer_specs(group)}
    return kinds.pop() if len(kinds) == 1 else None


def _role(transfer: Any) -> Iterator[str]:
    if transfer.kv_role != "kv_both":
        yield f'kv_role is "{transfer.kv_role}": the offload connector needs "kv_role": "kv_both"'


def failure_policy(config: Any, transfer: Any, failure: str) -> Iterator[str]:
    """`config`: with `allow_failed_requests`; `failure`: what would fail a request."""
    if transfer.kv_load_failure_policy == "fail" and not config.allow_failed_requests:
        yield (
            f'kv_load_failure_policy is "fail", vLLM\'s default: {failure} would'
            " fail its request instead of being computed again. Add to --kv-transfer-config:"
            f" {FAILURE_POLICY_LINE}"
        )


def _weight_updates(config: Any, vllm_config: Any) -> Iterator[str]:
    """vLLM does not tell a connector that weights have changed, only that its cache is void."""
    updates = getattr(vllm_config, "weight_transfer_config", None)
    if updates is not None and not config.allow_weight_updates:
        yield (
            "weight_transfer_config is set: unless each update of the weights is followed by"
            " reset_prefix_cache(reset_connector=True), KV of the old ones is served. Where it is"
            ' so, set "allow_weight_updates": true in kv_connector_extra_config'
        )


def _parallelism(parallel: Any) -> Iterator[str]:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} is {getattr(parallel, name)}: context parallelism is not supported"


def _engine(vllm_config: Any) -> Iterator[str]:
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        yield "sleep mode is on: the KV cache's memory would move under the connector"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield (
            "calculate_kv_scales is on: scales computed at run time differ between engines, so"
            " their KV caches are not interchangeable"
        )
    yield from _model(vllm_config)
    speculative = vllm_config.speculative_config
    method = getattr(speculative, "method", None)
    if speculative is not None and method not in SPECULATIONS_WITHOUT_KV:
        yield (
            f"speculative method {method!r} has a draft model with a KV cache of its own: not"
            f" supported yet (supported: {', '.join(SPECULATIONS_WITHOUT_KV)})"
        )


def _model(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.model_config
    if getattr(model, "is_diffusion", False):
        yield (
            "this is a diffusion model: it computes tokens of a block again and again, so what is"
            " full is not final"
        )
    auxiliary = getattr(vllm_config, "aux_output_config", None)
    routed = getattr(model, "enable_return_routed_experts", False)
    if routed or getattr(auxiliary, "enabled", False):
        yield (
            "enable_return_routed_experts is on: for tokens that are loaded nobody computes which"
            " experts they went to"
        )
    media = getattr(model, "multimodal_config", None)
    is_static = getattr(media, "mm_encoder_fp8_scale_path", None) is not None
    if getattr(media, "mm_encoder_attn_dtype", None) == "fp8" and not is_static:
        yield (
            'mm_encoder_attn_dtype is "fp8" without scales: what becomes of an image depends on'
            " those seen before. Set mm_encoder_fp8_scale_path"
        )


def _groups(groups: list[Any], version: tuple[int, int]) -> Iterator[str]:
    if not groups:
        yield "this model has no KV cache: there is nothing to move"
    if len(groups) > 1 and version < versions.SEVERAL_GROUPS_FIRST:
        yield (
            f"this model has {len(groups)} cache groups: vLLM before 0.30 cannot report a failed"
            " load there; update vLLM, or pass --disable-hybrid-kv-cache-manager"
        )
    for index, group in enumerate(groups):
        yield from _group(index, group)


def _group(index: int, group: Any) -> Iterator[str]:
    name = f"cache group {index} ({len(group.layer_names)} layers, {group.layer_names[0]}, ...)"
    if group_kind(group) is None:
        kinds = sorted({type(spec).__name__ for spec in versions.layer_specs(group)})
        yield f"{name} is of kind {', '.join(kinds)}: not supported"
        return
    if group.is_eagle_group:
        yield f"{name} belongs to a draft model: not supported yet"
    if not versions.is_transferable(group):
        yield f"{name} is kept in host memory by the engine: not supported"
    for spec in versions.layer_specs(group):
        if versions.quantisation(spec) not in QUANTISATIONS:
            yield f"{name} has KV quantisation {versions.quantisation(spec)}: not supported"
    if len({spec.num_kv_heads for spec in versions.layer_specs(group)}) > 1:
        yield f"{name} has layers with different numbers of KV heads: not supported"
