"""The worker role: what vLLM's worker says, to the ranks. One thread: the worker's."""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from msgspec.structs import replace
from vllm.distributed.parallel_state import get_tp_group

from kvferry._nixl import HOST, Memory
from kvferry.clock import Clock
from kvferry.device.host import HostCopier
from kvferry.device.staging import Allocate, host_memory
from kvferry.errors import InternalError
from kvferry.layout import PageGeometry, Region
from kvferry.metrics import Metrics
from kvferry.transfer.compatibility import Compatibility, compatibility_of
from kvferry.transfer.halves import Finished, Report
from kvferry.transfer.landing import CopierMaker
from kvferry.transfer.lease import CLOCK_DRIFT_MAX
from kvferry.transfer.nixl_link import NixlLink
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import RankLayout
from kvferry.transfer.workers import ConsumerWorker, ProducerWorker
from kvferry.vllm_plugin.identity import Rank
from kvferry.vllm_plugin.pd import refusals
from kvferry.vllm_plugin.pd.identity import rank_identity, storages
from kvferry.vllm_plugin.pd.messages import Plans, Ready, encode
from kvferry.vllm_plugin.weights import model_record
from kvferry.vllm_plugin.worker import this_rank


class Collected(NamedTuple):
    """Loads that ended, and requests whose lease is over at this rank."""

    loads: Finished = Finished()
    ended: frozenset[str] = frozenset()


class Place(NamedTuple):
    """Where the engine's KV cache lies, and what is brought there lands."""

    memory: Memory
    make_copier: CopierMaker
    allocate: Allocate
    slot_bytes: int


class WorkerRole:
    """Life: `register` once, then for each step `before_step`, `collect`, `report`; `close` at the
    end. Keeps the tensors alive whose addresses peers know."""

    def __init__(
        self,
        settings: Settings,
        vllm_config: Any,
        kv_cache_config: Any,
        clock: Clock,
        metrics: Metrics,
    ):
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._clock = clock
        self._metrics = metrics
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._producer: ProducerWorker | None = None
        self._consumer: ConsumerWorker | None = None
        self._was_full = False
        self.ready: Ready | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the ranks over the engine's memory. Raises ConfigError."""
        transfer = self._vllm_config.kv_transfer_config
        device_types = {tensor.device.type for tensor in kv_caches.values()}
        refusals.check_memory(self._settings, transfer, device_types)
        self._kv_caches = dict(kv_caches)
        self._place = place_of(next(iter(kv_caches.values())).device)
        if self._settings.slot_bytes is None:
            self._settings = replace(self._settings, slot_bytes=self._place.slot_bytes)
        rank = this_rank()
        model = model_record(self._settings, self._vllm_config)
        identity = rank_identity(self._vllm_config, self._kv_cache_config, kv_caches, rank, model)
        end = None
        if transfer.is_kv_producer:
            end = self._open_producer(identity.layout)
        if transfer.is_kv_consumer:
            self._open_consumer(
                identity.layout,
                compatibility_of(identity.fields, self._settings.direction),
                rank,
            )
        self.ready = Ready(rank.index, identity.fields, identity.namespace, end)

    def _open_producer(self, layout: RankLayout) -> Any:
        self._producer = ProducerWorker(
            self._settings,
            self._clock,
            self._metrics,
            NixlLink(self._clock, memory=self._place.memory),
            layout,
            storages(self._kv_caches),
            self._place.make_copier,
            self._place.allocate,
        )
        end = self._producer.open()
        self._producer.start()
        return end

    def _open_consumer(self, layout: RankLayout, compatibility: Compatibility, rank: Rank) -> None:
        self._consumer = ConsumerWorker(
            self._settings,
            self._clock,
            self._metrics,
            NixlLink(self._clock, memory=self._place.memory),
            layout,
            all_layouts(layout, rank),
            compatibility,
            self._place.make_copier,
            self._place.allocate,
        )
        self._consumer.open()
        self._consumer.start()

    def before_step(self, plans: Plans) -> None:
        """Raises InternalError once a mover has failed: what it does not answer must not be offered
        any more, or everybody waits for it in vain."""
        if any(worker.mover.has_failed for worker in self._workers):
            raise InternalError("transfer.mover", "a mover has failed, the log says why")
        if self._producer is not None:
            self._producer.rank.begin(plans.producer)
        if self._consumer is not None:
            self._consumer.rank.begin(plans.consumer)
        if plans != Plans():
            self._wake()

    def wait(self) -> None:
        """In a step that computes nothing."""
        if self._consumer is not None:
            self._consumer.rank.wait()

    def collect(self) -> Collected:
        loads = self._consumer.rank.collect() if self._consumer is not None else Finished()
        ended = self._producer.rank.take_ended() if self._producer is not None else ()
        return Collected(loads, frozenset(ended))

    def report(self) -> bytes | None:
        """None if there is nothing new to say."""
        if self._consumer is None:
            return None
        report = self._consumer.rank.report()
        is_news = report != Report() or self._was_full
        self._was_full = report.is_full
        return encode(report) if is_news else None

    def abandon(self) -> None:
        """Nothing is scattered any more that was not already being scattered, then `close`."""
        if self._consumer is not None:
            self._consumer.rank.fail_all("internal")
        self.close()

    def close(self) -> None:
        """Waits a few seconds for reads that are out. Idempotent. Blocks that others were promised
        stay as they are until their leases are over, also if the process lives on."""
        consumer, self._consumer = self._consumer, None
        producer, self._producer = self._producer, None
        if consumer is not None and not consumer.close():
            keep_alive(consumer, threading.TIMEOUT_MAX)
        if producer is not None:
            if not producer.close():
                keep_alive((producer, self._kv_caches), threading.TIMEOUT_MAX)
            elif not producer.rank.is_idle:
                keep_alive(self._kv_caches, self._settings.lease_s * (1 + CLOCK_DRIFT_MAX))
        self._kv_caches = {}

    def _wake(self) -> None:
        for worker in self._workers:
            worker.mover.wake()

    @property
    def _workers(self) -> list[ProducerWorker | ConsumerWorker]:
        return [worker for worker in (self._producer, self._consumer) if worker is not None]


def place_of(device: torch.device) -> Place:
    if device.type == "cpu":

        def make_host_copier(regions: Sequence[Region], geometry: PageGeometry) -> HostCopier:
            return HostCopier(regions, geometry, 1)

        return Place(HOST, make_host_copier, host_memory, 8 << 20)
    from kvferry.device.gpu import Cuda  # noqa: PLC0415 - triton, on GPUs only
    from kvferry.device.resident import ResidentCopier  # noqa: PLC0415

    cuda = Cuda(device)
    make_copier = functools.partial(ResidentCopier, cuda)
    return Place(Memory("VRAM", device.index or 0), make_copier, cuda.memory, 64 << 20)


def keep_alive(kept: object, duration_s: float) -> None:
    """Nobody renews leases any more, and nobody writes to these tensors; or what was read may still
    land in this rank's staging."""
    timer = threading.Timer(duration_s, lambda _: None, (kept,))
    timer.daemon = True
    timer.start()


def all_layouts(mine: RankLayout, rank: Rank) -> tuple[RankLayout, ...]:
    """Of all ranks of this engine, in order. All ranks call it."""
    if rank.count == 1:
        return (mine,)
    found: list[RankLayout | None] = [None] * rank.count
    torch.distributed.all_gather_object(found, mine, group=get_tp_group().cpu_group)
    return tuple(found)
