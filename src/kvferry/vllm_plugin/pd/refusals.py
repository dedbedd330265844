"""What cannot be transferred, or is not tested yet: refused at start, with the reason and what to
change. vLLM itself checks some of this for its own connector only, by that one's name."""

from collections.abc import Iterator
from typing import Any

from kvferry.errors import ConfigError
from kvferry.transfer.settings import Settings
from kvferry.vllm_plugin import refusals


def check(
    settings: Settings, vllm_config: Any, kv_cache_config: Any, version: tuple[int, int]
) -> None:
    """Raises ConfigError for the first thing that is refused."""
    transfer = vllm_config.kv_transfer_config
    refusals.refuse(
        lambda: _failure_policy(settings, transfer),
        lambda: _options(transfer),
        lambda: _parallelism(vllm_config.parallel_config),
        *refusals.of_engine(settings, vllm_config, kv_cache_config, version),
    )


def check_memory(settings: Settings, transfer: Any, device_types: set[str]) -> None:
    """Raises ConfigError where the KV cache lies in memory that no copier reaches, or should be
    moved by way of other memory. `transfer`: vLLM's `KVTransferConfig`."""
    refusals.check_memory(device_types)
    (device_type,) = device_types
    if transfer.kv_buffer_device != device_type:
        raise ConfigError(
            "vllm.refused",
            f"kv_buffer_device is {transfer.kv_buffer_device!r}, and the KV cache lies in"
            f" {device_type} memory: kvferry reads it where it is; leave kv_buffer_device out",
        )
    if settings.direction == "push" and device_type != "cpu":
        raise ConfigError(
            "vllm.refused",
            f'direction is "push", and the KV cache lies in {device_type} memory: not supported'
            ' yet; leave direction out ("pull")',
            key="direction",
        )


def _failure_policy(settings: Settings, transfer: Any) -> Iterator[str]:
    if transfer.is_kv_consumer:
        yield from refusals.failure_policy(settings, transfer, "a transfer that does not succeed")


def _options(transfer: Any) -> Iterator[str]:
    if getattr(transfer, "enable_permute_local_kv", False):
        yield (
            "enable_permute_local_kv is on: it is for vLLM's own connector. kvferry brings blocks"
            " into the order that this engine has; leave it out"
        )


def _parallelism(parallel: Any) -> Iterator[str]:
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: not supported by the"
            " transfer connector yet; use tensor parallelism"
        )
