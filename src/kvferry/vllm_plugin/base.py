"""What both connectors have in common: vLLM's names for what a `facade` does.

Construction opens everything and raises what is wrong, so that the engine does not start with a
connector that cannot work; later nothing is raised. vLLM makes one object for the scheduler and one
for each worker.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvferry.metrics import Metrics
from kvferry.vllm_plugin import stats


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """A subclass sets `_scheduler`, or `_worker` and `_worker_role`, by its role."""

    _metric_names: Mapping[str, str]
    _scheduler: Any
    _worker: Any
    _worker_role: Any

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._metrics = Metrics()
        self._failed_blocks: set[int] = set()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_role.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin in `handle_preemptions`, before the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """What leaves the engine does so in all layers at once, after the step."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Any:
        return self._worker.metadata()

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

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
            vllm_config, metric_types, labelnames, per_engine_labelvalues, cls._metric_names
        )
