"""`FerryTransferConnector`: what the transfer connector has beyond `vllm_plugin.base`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger

from kvferry.clock import Clock, SystemClock
from kvferry.transfer.settings import Settings, decode
from kvferry.vllm_plugin import log_as_vllm, sharing, stats, versions
from kvferry.vllm_plugin.base import FerryConnector
from kvferry.vllm_plugin.pd import refusals
from kvferry.vllm_plugin.pd.facade import SchedulerSide, WorkerSide
from kvferry.vllm_plugin.pd.messages import (
    HandshakeMetadata,
    StepMetadata,
    encode,
)
from kvferry.vllm_plugin.pd.scheduler import SchedulerRole, Shape
from kvferry.vllm_plugin.pd.worker import WorkerRole
from kvferry.vllm_plugin.refusals import group_kind
from kvferry.vllm_plugin.request import Adapters

log = init_logger("vllm.kvferry")


class FerryTransferConnector(FerryConnector):
    """See the module. Raises ConfigError if the engine must not start."""

    _cache_hit_source = versions.cache_hit_source("P2P")
    _metric_names = stats.TRANSFER_NAMES

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        version = versions.check_version()
        settings = decode(vllm_config.kv_transfer_config.kv_connector_extra_config)
        refusals.check(settings, vllm_config, kv_cache_config, version)
        clock = SystemClock()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side(settings, clock)
        else:
            worker = WorkerRole(settings, vllm_config, kv_cache_config, clock, self._metrics)
            self._worker_role = worker
            self._worker = WorkerSide(worker, self._metrics, clock, settings.lease_s)

    def _scheduler_side(self, settings: Settings, clock: Clock) -> SchedulerSide:
        transfer, parallel = self._vllm_config.kv_transfer_config, self._vllm_config.parallel_config
        groups = self._kv_cache_config.kv_cache_groups
        shared = sharing.of_engine(self._vllm_config)
        for reason in shared.reasons():
            log.warning("%s", reason)
        role = SchedulerRole(
            settings,
            clock,
            self._metrics,
            Shape(
                parallel.world_size,
                tuple(group.kv_cache_spec.block_size for group in groups),
                transfer.is_kv_producer,
                transfer.is_kv_consumer,
                getattr(parallel, "data_parallel_index", 0),
                frozenset(
                    n for n, group in enumerate(groups) if group_kind(group) == "sliding window"
                ),
            ),
            Adapters(clock.wall_s()),
            shared,
        )
        return SchedulerSide(role, self._metrics)

    # Worker

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        ready = self._worker_role.ready
        return None if ready is None else HandshakeMetadata(encode(ready))

    def wait_for_save(self) -> None:
        """What leaves the engine does so when the step is over (`get_transfer_results`)."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._worker.results()
        return versions.transfer_results(set(results.done), set(results.failed), results.sent)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Before 0.30; later versions call `get_transfer_results`."""
        results = self._worker.results()
        self._failed_blocks |= results.blocks
        return set(results.sent), set(results.done)

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], HandshakeMetadata]
    ) -> None:
        self._scheduler.ready(list(metadata.values()))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        self._scheduler.scheduled(scheduler_output)
        return self._scheduler.build(is_empty=scheduler_output.total_num_scheduled_tokens == 0)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_news

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True: blocks stay until nobody reads them any more."""
        return self._scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool:
        """False while blocks are kept for a consumer: try again when their leases are over."""
        return self._scheduler.reset()

    # Both

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked from 0.33 on: peers know addresses that would not survive it."""
        return False
