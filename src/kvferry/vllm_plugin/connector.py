"""`FerryStoreConnector`: what the offload connector has beyond `base`."""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger

import kvferry
from kvferry.clock import Clock, SystemClock
from kvferry.config import Config, decode
from kvferry.offload.base import Identity
from kvferry.offload.build import open_planner
from kvferry.vllm_plugin import events, log_as_vllm, refusals, sharing, stats, versions
from kvferry.vllm_plugin.base import FerryConnector
from kvferry.vllm_plugin.facade import SchedulerSide, WorkerSide
from kvferry.vllm_plugin.messages import StepMetadata
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


class FerryStoreConnector(FerryConnector):
    """See the module. Raises ConfigError or UnavailableError if the engine must not start."""

    _cache_hit_source = versions.cache_hit_source()
    _metric_names = stats.STORE_NAMES

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        version = versions.check_version()
        config = decode(vllm_config.kv_transfer_config.kv_connector_extra_config)
        refusals.check(config, vllm_config, kv_cache_config, version)
        clock = SystemClock()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._open_scheduler(config, clock)
        else:
            worker = WorkerRole(config, vllm_config, kv_cache_config, clock, self._metrics)
            self._worker_role = worker
            self._worker = WorkerSide(worker, self._metrics)

    def _open_scheduler(self, config: Config, clock: Clock) -> SchedulerSide:
        rank_count = self._vllm_config.parallel_config.world_size
        describe = events.of_engine(self._vllm_config, self._kv_cache_config)
        self._tells_events = describe is not None
        planner = open_planner(config, clock, self._metrics, rank_count, describe)
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

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:  # rare: most steps end here
            self._scheduler.update(metadata)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: the fence protects what is still gathered."""
        self._scheduler.finished(request, block_ids)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if self._tells_events else ()

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True
