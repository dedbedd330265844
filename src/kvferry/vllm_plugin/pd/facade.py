"""The edge where our errors end, as in the offload connector, with a ledger of both roles: every
load that vLLM waits for is answered once, and blocks that it keeps for us are let go once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from kvferry.clock import Clock
from kvferry.metrics import Metrics
from kvferry.transfer.lease import CLOCK_DRIFT_MAX
from kvferry.vllm_plugin.facade import Edge
from kvferry.vllm_plugin.pd.messages import (
    HandshakeMetadata,
    StepMetadata,
    WorkerMetadata,
    encode,
)
from kvferry.vllm_plugin.pd.scheduler import SchedulerRole
from kvferry.vllm_plugin.pd.worker import Collected, WorkerRole

log = init_logger("vllm.kvferry")


class SchedulerSide:
    """Edge and ledger around the scheduler role. One thread: the scheduler's."""

    def __init__(self, role: SchedulerRole, metrics: Metrics):
        self._role = role
        self._edge = Edge(metrics, role.close)
        self._unsent_loads: dict[str, Any] = {}  # allocated, and no plan names them yet
        self._unsent_holds: set[str] = set()  # kept, and no plan names them yet

    def ready(self, metadata: Sequence[Any]) -> None:
        """At start: raises what is wrong."""
        ranks = [rank for rank in metadata if isinstance(rank, HandshakeMetadata)]
        if not ranks:
            log.error(
                "kvferry transfers nothing: another connector beside it exchanges handshakes, and"
                " vLLM lets only one do that"
            )
            return
        self._role.open([rank.decode() for rank in ranks])

    def new_request(self, request: Any) -> None:
        self._edge.call(self._role.new_request, request, otherwise=None)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._edge.call(self._role.match, request, computed_tokens, otherwise=0)
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        if external_tokens:
            self._unsent_loads[request.request_id] = blocks
        self._edge.call(self._role.allocated, request, blocks, external_tokens, otherwise=None)

    def scheduled(self, output: Any) -> None:
        """The step that has been decided, before its `build`."""
        self._edge.call(self._role.scheduled, output, otherwise=None)

    def build(self, is_empty: bool) -> StepMetadata:
        loads, self._unsent_loads = self._unsent_loads, {}
        holds, self._unsent_holds = self._unsent_holds, set()
        plans = self._edge.call(self._build, loads, holds, otherwise=None)
        return StepMetadata(
            plans=plans,
            lost_loads=tuple((name, _flat(blocks)) for name, blocks in loads.items()),
            lost_holds=tuple(holds),
            is_empty=is_empty,
        )

    def _build(self, loads: dict[str, Any], holds: set[str]) -> bytes:
        """The encoded plans. Takes from the ledgers what they name; the rest nobody will."""
        plans = self._role.build()
        encoded = encode(plans)
        for load in plans.consumer.loads:
            loads.pop(load.request_id, None)
        holds.difference_update(hold.request_id for hold in plans.producer.holds)
        return encoded

    @property
    def has_news(self) -> bool:
        if self._edge.is_aside:
            return bool(self._unsent_holds)
        return self._role.has_news

    def update(self, output: Any) -> None:
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._edge.call(self._receive, metadata, otherwise=None)
            if metadata.is_aside:
                self._edge.stand_aside("a worker stands aside, its log says why")
        sent, loaded = output.finished_sending or (), output.finished_recving or ()
        failed = getattr(output, "failed_recving", None) or ()
        self._edge.call(self._role.ended, sent, loaded, failed, otherwise=None)

    def _receive(self, metadata: WorkerMetadata) -> None:
        self._role.receive(metadata.decode())

    def finished(
        self, request: Any, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True: the blocks are to be kept until a rank's `results` say otherwise."""
        params = self._edge.call(self._role.finished, request, tables, otherwise=None)
        if params is None:
            return False, None
        self._unsent_holds.add(request.request_id)
        return True, params

    def reset(self) -> bool:
        return self._edge.call(self._role.reset, otherwise=True)

    def close(self) -> None:
        self._edge.call(self._role.close, otherwise=None)


def _flat(blocks: Any) -> tuple[int, ...]:
    return tuple(id_ for group in blocks.get_block_ids() for id_ in group if id_)


@dataclass(frozen=True, slots=True)
class Results:
    """What vLLM is told once of each. `failed`: part of `done`; `blocks`: all of theirs; `sent`:
    whose blocks nobody reads any more."""

    done: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    blocks: frozenset[int] = frozenset()
    sent: frozenset[str] = frozenset()


class WorkerSide:
    """Edge and ledger around the worker role. One thread: the worker's. `lease_s`: for how long a
    reader may still believe in a lease when nobody renews any."""

    def __init__(self, role: WorkerRole, metrics: Metrics, clock: Clock, lease_s: float):
        self._role = role
        self._clock = clock
        self._lease_s = lease_s * (1 + CLOCK_DRIFT_MAX)
        self._edge = Edge(metrics, self._settle)
        self._pending: dict[str, tuple[int, ...]] = {}
        self._held: set[str] = set()
        self._lost_loads: dict[str, tuple[int, ...]] = {}
        self._lost_holds: set[str] = set()
        self._over_s = float("inf")
        self._has_told = False
        self._is_empty = False

    def before_step(self, metadata: StepMetadata) -> None:
        self._is_empty = metadata.is_empty
        self._lost_loads.update(metadata.lost_loads)
        self._lost_holds.update(metadata.lost_holds)
        plans = metadata.decode()
        if plans is None:
            self._edge.stand_aside("the scheduler side stands aside")
            return
        for load in plans.consumer.loads:
            blocks = (block for table in load.tables for block in table if block > 0)
            self._pending[load.request_id] = tuple(blocks)
        self._held.update(hold.request_id for hold in plans.producer.holds)
        self._edge.call(self._role.before_step, plans, otherwise=None)

    def results(self) -> Results:
        """Of this step."""
        if self._is_empty:
            self._edge.call(self._role.wait, otherwise=None)
        collected = self._edge.call(self._role.collect, otherwise=Collected())
        lost, self._lost_loads = self._lost_loads, {}
        sent, self._lost_holds = self._lost_holds, set()
        sent |= collected.ended & self._held
        if self._edge.is_aside:
            lost = lost | self._pending
            if self._clock.now_s() > self._over_s:
                sent |= self._held
        done = collected.loads.done & self._pending.keys() | lost.keys()
        failed = collected.loads.failed & self._pending.keys() | lost.keys()
        blocks = lost | {name: self._pending[name] for name in failed if name in self._pending}
        for request_id in done:
            self._pending.pop(request_id, None)
        self._held -= sent
        return Results(
            frozenset(done),
            frozenset(failed),
            frozenset().union(*blocks.values()),
            frozenset(sent),
        )

    def metadata(self) -> WorkerMetadata | None:
        report = self._edge.call(self._role.report, otherwise=None)
        must_tell = self._edge.is_aside and not self._has_told
        self._has_told = self._edge.is_aside
        if report is None and not must_tell:
            return None
        return WorkerMetadata((report,) if report else (), must_tell)

    def close(self) -> None:
        self._edge.call(self._role.close, otherwise=None)

    def _settle(self) -> None:
        """Nobody renews a lease any more once the role is closed."""
        try:
            self._role.abandon()
        finally:
            self._over_s = self._clock.now_s() + self._lease_s
