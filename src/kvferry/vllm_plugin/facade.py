"""The edge where our errors end: the engine serves on, whatever happens to kvferry.

An error that nothing below has planned for is our own bug. The side on which it appears settles
what vLLM waits for, then stands aside: it answers "nothing found", takes nothing and stores
nothing. Each side keeps a ledger of loads, so that every load that vLLM waits for is answered once
and no more, even if the half behind it has lost its mind.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from vllm.logger import init_logger

from kvferry.metrics import Metrics
from kvferry.offload.base import Finished, Plan
from kvferry.vllm_plugin.messages import StepMetadata, WorkerMetadata, encode
from kvferry.vllm_plugin.scheduler import SchedulerRole
from kvferry.vllm_plugin.worker import WorkerRole

log = init_logger("vllm.kvferry")

T = TypeVar("T")

STAND_ASIDE = Plan(drop_stores=True)
"""What workers get from a scheduler side that stands aside: without its word on which blocks are
overwritten no gather may go on."""


class Edge:
    """Calls into kvferry. `settle` runs once, when the first error appears. One thread."""

    def __init__(self, metrics: Metrics, settle: Callable[[], None]):
        self._metrics = metrics
        self._settle = settle
        self.is_aside = False

    def call(self, work: Callable[..., T], *arguments: Any, otherwise: T) -> T:
        """The result of `work`, or `otherwise` if it fails or we stand aside."""
        if self.is_aside:
            return otherwise
        try:
            return work(*arguments)
        except Exception as error:  # whatever it is, vLLM would die of it
            self._note(error)
            self.stand_aside(f"{type(error).__name__}: {error}")
        return otherwise

    def stand_aside(self, reason: str) -> None:
        """Idempotent."""
        if self.is_aside:
            return
        self.is_aside = True
        log.error("kvferry stands aside, the engine serves on without it: %s", reason)
        self._metrics.set("kvferry_standing_aside", 1)
        try:
            self._settle()
        except Exception as error:  # the same
            self._note(error)

    def _note(self, error: Exception) -> None:
        log.error("an error of kvferry's own", exc_info=error)
        self._metrics.count("kvferry_internal_errors_total", where="facade")


class SchedulerSide:
    """Edge and ledger around the scheduler role. One thread: the scheduler's."""

    def __init__(self, role: SchedulerRole, metrics: Metrics):
        self._role = role
        self._edge = Edge(metrics, role.close)
        self._unsent: dict[str, Any] = {}  # what was allocated for loads that no plan names yet

    def bind(self, block_manager: Any) -> None:
        self._edge.call(self._role.bind, block_manager, otherwise=None)

    def new_request(self, request: Any) -> None:
        self._edge.call(self._role.new_request, request, otherwise=None)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._edge.call(self._role.match, request, computed_tokens, otherwise=0)
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        if external_tokens:
            self._unsent[request.request_id] = blocks
        self._edge.call(self._role.allocated, request, blocks, external_tokens, otherwise=None)

    def build(self, output: Any) -> StepMetadata:
        unsent, self._unsent = self._unsent, {}
        plan = self._edge.call(self._build, output, unsent, otherwise=None)
        given_up = [(name, _flat(blocks)) for name, blocks in unsent.items()] if unsent else ()
        return StepMetadata(plan, output.total_num_scheduled_tokens == 0, tuple(given_up))

    def update(self, metadata: Any) -> None:
        """What the workers said, if it is for us."""
        if not isinstance(metadata, WorkerMetadata):
            return
        self._edge.call(self._role.receive, metadata, otherwise=None)
        if metadata.is_aside:
            self._edge.stand_aside("a worker stands aside, its log says why")

    def finished(self, request: Any, tables: tuple[list[int], ...]) -> None:
        self._edge.call(self._role.finished, request, tables, otherwise=None)

    def reset(self) -> None:
        self._edge.call(self._role.reset, otherwise=None)

    def take_events(self) -> list[Any]:
        return self._edge.call(self._role.take_events, otherwise=[])

    def close(self) -> None:
        self._edge.call(self._role.close, otherwise=None)

    def _build(self, output: Any, unsent: dict[str, Any]) -> bytes:
        """The encoded plan. Takes from `unsent` what the plan loads; the rest nobody will."""
        plan = self._role.build(output)
        encoded = encode(plan)
        for load in plan.loads:
            unsent.pop(load.request_id, None)
        return encoded


def _flat(blocks: Any) -> tuple[int, ...]:
    return tuple(id_ for group in blocks.get_block_ids() for id_ in group)


class WorkerSide:
    """Edge and ledger around the worker role. One thread: the worker's."""

    def __init__(self, role: WorkerRole, metrics: Metrics):
        self._role = role
        self._edge = Edge(metrics, role.close)
        self._pending: dict[str, tuple[int, ...]] = {}
        self._given_up: dict[str, tuple[int, ...]] = {}
        self._is_forward_due = False
        self._is_empty = False
        self._has_told = False

    def before_step(self, metadata: StepMetadata) -> None:
        self._is_forward_due, self._is_empty = True, metadata.is_empty
        self._given_up.update(metadata.given_up)
        plan = metadata.decode() or STAND_ASIDE
        for load in plan.loads:
            blocks = (block for span in load.spans for block in span.blocks if block > 0)
            self._pending[load.request_id] = tuple(blocks)
        self._edge.call(self._role.before_step, plan, otherwise=None)

    def after_forward(self) -> None:
        """Once for each step, after whatever it computed."""
        if self._is_forward_due:
            self._is_forward_due = False
            self._edge.call(self._role.after_forward, self._is_empty, otherwise=None)

    def finish_empty_step(self) -> None:
        """Before 0.31 vLLM says nothing after a step that computes nothing."""
        if self._is_empty:
            self.after_forward()

    def results(self) -> Finished:
        """Loads that ended, each once."""
        finished = self._edge.call(self._role.collect, otherwise=Finished())
        lost = self._given_up
        if self._edge.is_aside:
            lost = lost | self._pending
        done = finished.done & self._pending.keys() | lost.keys()
        failed = finished.failed & self._pending.keys() | lost.keys()
        blocks = finished.failed_blocks.union(*lost.values())
        for request_id in done:
            self._pending.pop(request_id, None)
        self._given_up = {}
        return Finished(frozenset(done), frozenset(failed), frozenset(blocks))

    def metadata(self) -> WorkerMetadata | None:
        report = self._edge.call(self._role.report, otherwise=None)
        must_tell = self._edge.is_aside and not self._has_told
        self._has_told = self._edge.is_aside
        if report is None and not must_tell:
            return None
        return WorkerMetadata((report,) if report else (), must_tell)

    def close(self) -> None:
        self._edge.call(self._role.close, otherwise=None)
