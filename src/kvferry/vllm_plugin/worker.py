"""The worker role: what vLLM's worker says, to the jobs. One thread: the worker's."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.device.staging import Staging
from kvferry.errors import UnavailableError
from kvferry.metrics import Metrics
from kvferry.offload.base import Finished, LocalPart, Plan
from kvferry.offload.build import OpenedCopiers, open_jobs
from kvferry.offload.worker.jobs import Jobs
from kvferry.vllm_plugin import refusals
from kvferry.vllm_plugin.identity import Rank, local_parts
from kvferry.vllm_plugin.messages import encode
from kvferry.vllm_plugin.weights import model_record

READY_S = 60.0
"""How long an engine's start waits for a GPU's staging and kernels."""


class WorkerRole:
    """Life: `register` once, then for each step `before_step`, `after_forward`, `collect`,
    `report`; `close` at the end. Keeps the tensors alive whose addresses the jobs know."""

    def __init__(
        self, config: Config, vllm_config: Any, kv_cache_config: Any, clock: Clock, metrics: Metrics
    ):
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._clock = clock
        self._metrics = metrics
        self._jobs: Jobs | None = None
        self._kv_caches: Mapping[str, torch.Tensor] = {}

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the jobs over the engine's memory. Raises ConfigError, UnavailableError."""
        refusals.check_memory({tensor.device.type for tensor in kv_caches.values()})
        self._kv_caches = dict(kv_caches)
        rank = this_rank()
        model = model_record(self._config, self._vllm_config)
        parts = local_parts(
            self._config, self._vllm_config, self._kv_cache_config, kv_caches, rank, model
        )
        device = next(iter(kv_caches.values())).device
        self._jobs = open_jobs(
            self._config,
            self._clock,
            self._metrics,
            rank.index,
            rank.count,
            rank.stage,
            parts,
            functools.partial(open_gpu_copiers, self._config, device)
            if device.type == "cuda"
            else None,
        )

    def before_step(self, plan: Plan) -> None:
        if self._jobs is not None:
            self._jobs.before_step(plan)

    def after_forward(self, is_empty_step: bool) -> None:
        if self._jobs is not None:
            self._jobs.after_forward(is_empty_step)

    def collect(self) -> Finished:
        return self._jobs.collect() if self._jobs is not None else Finished()

    def report(self) -> bytes | None:
        report = self._jobs.report() if self._jobs is not None else None
        return None if report is None else encode(report)

    def close(self) -> None:
        if self._jobs is not None:
            self._jobs.close()
        self._kv_caches = {}


def open_gpu_copiers(
    config: Config, device: torch.device, staging: Staging, local_parts: Sequence[LocalPart]
) -> OpenedCopiers:
    """Copiers of one GPU, ready for work: vLLM captures CUDA graphs next, and while it does no
    other thread may pin memory or load kernels. See `build.OpenCopiers`. Raises ConfigError,
    UnavailableError."""
    from kvferry.device.gpu import Cuda, Gpu, GpuCopier  # noqa: PLC0415 - triton, on GPUs only

    gpu = Gpu(Cuda(device), staging.address, staging.length_bytes, config.gpu_buffer_bytes)
    copiers = [GpuCopier(gpu, local.regions, local.part.geometry) for local in local_parts]
    gpu.open([copier.warm_up for copier in copiers])
    if not gpu.is_ready(READY_S):
        raise UnavailableError("device.pinning", f"staging is not pinned after {READY_S:.0f} s")
    return OpenedCopiers(copiers, gpu.close)


def this_rank() -> Rank:
    """This process among the ranks of its engine (data-parallel engines are others)."""
    tp, pp = get_tp_group(), get_pp_group()
    return Rank(
        index=pp.rank_in_group * tp.world_size + tp.rank_in_group,
        count=pp.world_size * tp.world_size,
        stage=pp.rank_in_group,
        stage_count=pp.world_size,
        tp_index=tp.rank_in_group,
        tp_count=tp.world_size,
    )
