"""`FerryStoreConnector`: the class that vLLM makes, one for the scheduler and one for each worker.

It only gives vLLM's names to what `facade` does. Construction opens everything and raises what is
wrong, so that the engine does not start with a connector that cannot work; later nothing is raised.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

import kvferry
from kvferry.clock import Clock, SystemClock
from kvferry.config import Config, decode
from kvferry.metrics import Metrics
from kvferry.offload.base import Identity
from kvferry.offload.build import open_planner
from kvferry.vllm_plugin import refusals, sharing, stats, versions
from kvferry.vllm_plugin.facade import SchedulerSide, WorkerSide
from kvferry.vllm_plugin.messages import StepMetadata, WorkerMetadata
from kvferry.vllm_plugin.request import Adapters
from kvferry.vllm_plugin.scheduler import SchedulerRole
from kvferry.vllm_plugin.worker import WorkerRole

log = init_logger("vllm.kvferry")


def described(config: Config, identity: Identity) -> str:
    """The line of an engine's log that says where its pages are and how they are named: the
    namespaces are those that `kvferry status` shows."""
    parts = ", ".join(
        f"{part.namespace.hex()[:12]} ({part.chunk_tokens} tokens in a chunk)"
        for part in identity.parts
    )
    capacity = f"{config.capacity_bytes} bytes" if config.capacity_bytes else "the store's own"
    return (
        f"kvferry {kvferry.__version__} loads and stores: pages {config.pages}, catalog"
        f" {config.catalog_url(identity.store_id)}, capacity {capacity}, namespace {parts}"
    )


class FerryStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises ConfigError or UnavailableError if the engine must not start."""

    _cache_hit_source = versions.cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        version = versions.check_version()
        config = decode(vllm_config.kv_transfer_config.kv_connector_extra_config)
        refusals.check(config, vllm_config, kv_cache_config, version)
        clock = SystemClock()
        self._metrics = Metrics()
        self._failed_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._open_scheduler(config, clock)
        else:
            worker = WorkerRole(config, vllm_config, kv_cache_config, clock, self._metrics)
            self._worker_role = worker
            self._worker = WorkerSide(worker, self._metrics)

    def _open_scheduler(self, config: Config, clock: Clock) -> SchedulerSide:
        rank_count = self._vllm_config.parallel_config.world_size
        planner = open_planner(config, clock, self._metrics, rank_count)
        groups = self._kv_cache_config.kv_cache_groups
        shared = sharing.of_engine(self._vllm_config)
        for reason in shared.reasons():
            log.warning("%s", reason)
        role = SchedulerRole(
            planner,
            Adapters(clock.wall_s()),
            [group.kv_cache_spec.block_size for group in groups],
            shared,
            lambda identity: log.info("%s", described(config, identity)),
        )
        return SchedulerSide(role, self._metrics)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped costs a hit, nothing else."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_role.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin in `handle_preemptions`, before the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores take all layers of full chunks, after the step."""

    def wait_for_save(self) -> None:
        self._worker.after_forward()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._worker.finish_empty_step()
        finished = self._worker.results()
        return versions.transfer_results(set(finished.done), set(finished.failed))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Before 0.30; later versions call `get_transfer_results`."""
        self._worker.finish_empty_step()
        finished = self._worker.results()
        self._failed_blocks |= finished.failed_blocks
        return None, set(finished.done)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self._worker.metadata()

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:  # rare: most steps end here
            self._scheduler.update(metadata)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: the fence protects what is still gathered."""
        self._scheduler.finished(request, block_ids)
        return False, None

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    # Both

    def get_kv_connector_stats(self) -> stats.Stats | None:
        snapshot = self._metrics.drain()
        return stats.Stats(data=snapshot) if snapshot else None

    def shutdown(self) -> None:
        side = self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker
        side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> stats.Stats:
        return stats.Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> stats.PrometheusMetrics:
        return stats.PrometheusMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
