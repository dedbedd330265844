"""The scheduler role: what vLLM's scheduler says, to the planner; its plans, to the step.

One thread: the scheduler's. Nothing here waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvferry.offload.base import Identity, Plan, Step
from kvferry.offload.scheduler.planner import Planner
from kvferry.vllm_plugin.messages import WorkerMetadata
from kvferry.vllm_plugin.request import Adapters, EngineRequest
from kvferry.vllm_plugin.sharing import EVERYTHING, Sharing
from kvferry.vllm_plugin.versions import TableSource, rewritten_blocks

NULL_BLOCK = 0


class SchedulerRole:
    """Translates. Knows for each request how many tokens the engine had itself at its last match,
    and how long its block tables were, to tell which blocks a step allocated newly."""

    def __init__(
        self,
        planner: Planner,
        adapters: Adapters,
        group_block_tokens: list[int],
        sharing: Sharing = EVERYTHING,
        announce: Callable[[Identity], None] = lambda identity: None,
    ):
        """`announce`: told who the first rank is, as soon as it has said so."""
        self._planner = planner
        self._adapters = adapters
        self._sharing = sharing
        self._announce = announce
        self._group_block_tokens = group_block_tokens
        self._tables = TableSource()
        self._known_counts: dict[str, list[int]] = {}
        self._new_blocks: set[int] = set()

    def bind(self, block_manager: Any) -> None:
        """Before the first step, where vLLM hands its block manager over."""
        self._tables.bind(block_manager)

    def new_request(self, request: Any) -> None:
        self._planner.on_new_request(EngineRequest(request, self._adapters, self._sharing))

    def match(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `computed_tokens`; None: ask again."""
        request_id = request.request_id
        self._known_counts.pop(request_id, None)
        if computed_tokens:
            self._known_counts[request_id] = [
                computed_tokens // tokens for tokens in self._group_block_tokens
            ]
        return self._planner.match(request_id, computed_tokens, request.num_tokens)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """A waiting request was admitted, or a loaded one got the rest of its blocks."""
        request_id, tables = request.request_id, blocks.get_block_ids()
        known_counts = self._known_counts.get(request_id)
        if known_counts is None:
            self._new_blocks.update(*tables)
        else:
            for table, known in zip(tables, known_counts, strict=True):
                self._new_blocks.update(table[known:])
        self._known_counts[request_id] = list(map(len, tables))
        self._tables.allocated(request_id, tables)
        self._planner.allocated(request_id, tables, external_tokens)

    def build(self, output: Any) -> Plan:
        """The plan of the step that vLLM's scheduler has just decided."""
        self._tables.begin_step(output)
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        request_ids, computed_tokens = cached.req_ids, cached.num_computed_tokens
        if new:
            request_ids = request_ids + [data.req_id for data in new]
            computed_tokens = computed_tokens + [data.num_computed_tokens for data in new]
        rewritten = rewritten_blocks(output)
        return self._planner.build(
            Step(
                request_ids=request_ids,
                computed_tokens=computed_tokens,
                scheduled_tokens=output.num_scheduled_tokens,
                token_count=output.total_num_scheduled_tokens,
                preempted=output.preempted_req_ids or (),
                new_blocks=self._take_new_blocks(output, rewritten),
                tables=self._tables.tables,
                rewritten=rewritten,
            )
        )

    def _take_new_blocks(self, output: Any, rewritten: Sequence[int]) -> set[int]:
        """Blocks allocated since the last step. A resumed request's whole table is in the output:
        what is new in it was told when it was admitted."""
        new_blocks, self._new_blocks = self._new_blocks, set()
        cached = output.scheduled_cached_reqs
        tables = cached.new_block_ids
        if cached.resumed_req_ids:
            pairs = zip(cached.req_ids, tables, strict=True)
            tables = [table for id_, table in pairs if id_ not in cached.resumed_req_ids]
        for groups in filter(None, tables):
            new_blocks.update(*groups)
        new_blocks.update(rewritten)
        new_blocks.discard(NULL_BLOCK)
        return new_blocks

    def receive(self, metadata: WorkerMetadata) -> None:
        for report in metadata.decode():
            self._planner.receive(report)
            for identity in report.identities:
                if identity.rank == 0:
                    self._announce(identity)

    def finished(self, request: Any, tables: tuple[list[int], ...]) -> None:
        """Called before the blocks are freed; also for requests that never ran."""
        self._known_counts.pop(request.request_id, None)
        self._tables.finished(request.request_id)
        self._planner.finished(request.request_id, tables)

    def reset(self) -> None:
        self._planner.reset()

    def take_events(self) -> list[Any]:
        return self._planner.take_events()

    def close(self) -> None:
        self._planner.close()
