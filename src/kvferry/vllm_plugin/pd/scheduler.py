"""The scheduler role: what vLLM's scheduler says, to the halves of producer and consumer; their
plans, to the step. One thread: the scheduler's. Nothing here waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.device.base import SKIP
from kvferry.errors import ConfigError
from kvferry.keys import namespace_digest
from kvferry.metrics import Metrics
from kvferry.transfer.compatibility import compatibility_of
from kvferry.transfer.consumer import Consumer
from kvferry.transfer.halves import Report, Tables
from kvferry.transfer.handshake import Listener
from kvferry.transfer.params import ID_BYTES, wants_remote_decode
from kvferry.transfer.producer import Identity, Producer
from kvferry.transfer.settings import Settings
from kvferry.vllm_plugin.pd.messages import Plans, Ready
from kvferry.vllm_plugin.request import Adapters, EngineRequest
from kvferry.vllm_plugin.sharing import EVERYTHING, Sharing
from kvferry.vllm_plugin.versions import TableSource

NULL_BLOCK = 0
COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
NAME_DEADLINE_S = 60.0
CLOSE_S = 2.0


class RequestPrefix:
    """`producer.Prefix` of a request. What names it may be in files, unless it has been looked for
    before: then on the runner's thread only."""

    def __init__(self, request: EngineRequest, tokens: Sequence[int]):
        self.tokens = tokens
        self._request = request

    def extras_of(self, token_count: int) -> bytes | None:
        return self._request.extras(0, token_count) if self._request.name() else None


@dataclass(slots=True)
class Prefill:
    """A request whose client wants another engine to go on, and its parameters. `ticket`: its
    adapter is looked at. `is_met`: whether a reader may come while it runs, None: not known yet.
    `told_count`: tokens of its prompt that ranks know to be computed."""

    request: EngineRequest
    params: Any
    token_count: int
    ticket: Ticket | None
    is_met: bool | None = None
    told_count: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What the scheduler knows of its engine. `index`: among data-parallel engines.
    `shrinking_groups`: those that give blocks up while a request runs."""

    rank_count: int
    group_block_tokens: tuple[int, ...]
    is_producer: bool
    is_consumer: bool
    index: int = 0
    shrinking_groups: frozenset[int] = frozenset()


class SchedulerRole:
    """Life: `open` at start with what all ranks have said, then steps; `close` is idempotent.
    Before `open` (a connector above this one keeps what ranks say) nothing is transferred."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        shape: Shape,
        adapters: Adapters,
        sharing: Sharing = EVERYTHING,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._shape = shape
        self._adapters = adapters
        self._sharing = sharing
        self._runner = Runner(clock, metrics)
        self._listener: Listener | None = None
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._namespace = b""
        self._weights_name = settings.weights_id
        self._is_resetting = False
        self._prefills: dict[str, Prefill] = {}
        self._tables = TableSource()
        self._computed: dict[str, int] = {}

    def open(self, ranks: Sequence[Ready]) -> None:
        """Raises ConfigError if they do not fit together, or the listener cannot listen."""
        ranks = sorted(ranks, key=lambda ready: ready.rank)
        check_agreement(ranks, self._shape.rank_count)
        self._namespace = ranks[0].namespace
        self._runner.start()
        if self._shape.is_producer:
            self._open_producer(ranks)
        if self._shape.is_consumer:
            self._consumer = Consumer(
                self._settings,
                self._clock,
                self._metrics,
                self._runner,
                self._namespace,
                self._shape.rank_count,
            )

    def _open_producer(self, ranks: Sequence[Ready]) -> None:
        boot = self._clock.random_bytes(ID_BYTES)
        compatibility = compatibility_of(ranks[0].fields, self._settings.direction)
        listener = Listener(
            self._settings, boot, compatibility, self._clock, self._metrics, self._shape.index
        )
        listener.open()
        listener.serve(tuple(ready.end for ready in ranks))
        self._listener = listener
        self._producer = Producer(
            self._settings,
            self._clock,
            self._metrics,
            Identity(boot, self._namespace),
            listener.port,
        )

    def new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        known = EngineRequest(request, self._adapters, self._sharing)
        if self._producer is not None and wants_remote_decode(params):
            has_adapter = request.lora_request is not None
            ticket = self._runner.submit(known.name, NAME_DEADLINE_S) if has_adapter else None
            prefill = Prefill(known, params, request.num_prompt_tokens, ticket)
            self._prefills[request.request_id] = prefill
            if self._is_pushing:  # whoever has the other half may be here already
                prefill.is_met = self._meets(request.request_id, prefill)
        elif self._consumer is not None and known.is_cacheable and known.is_readable:
            prefix = RequestPrefix(known, known.tokens)
            self._consumer.on_new_request(request.request_id, params, prefix)

    def match(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `computed_tokens`; None: ask again."""
        if self._consumer is None:
            return 0
        count = self._consumer.matched(request.request_id, computed_tokens)
        if count:
            self._computed[request.request_id] = computed_tokens
        return count

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """A waiting request was admitted, or a loaded one goes on."""
        if self._is_pushing and request.request_id in self._prefills:
            self._tables.allocated(request.request_id, blocks.get_block_ids())
        if self._consumer is None:
            return
        computed_tokens = self._computed.pop(request.request_id, 0)
        tables = _tables(blocks.get_block_ids()) if external_tokens else ()
        self._consumer.allocated(request.request_id, tables, computed_tokens, external_tokens)

    def scheduled(self, output: Any) -> None:
        """The step that vLLM's scheduler has just decided, before `build`: what it computes of
        prefills that readers may have come for, and what it takes from them."""
        if not self._is_pushing:
            return
        self._tables.begin_step(output)
        for request_id in output.preempted_req_ids or ():
            if request_id in self._prefills:
                self._prefills[request_id].told_count = 0
                self._producer.withdraw(request_id)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id in computed.keys() & self._prefills.keys():
            end = computed[request_id] + output.num_scheduled_tokens[request_id]
            self._progress(request_id, self._prefills[request_id], end)

    @property
    def _is_pushing(self) -> bool:
        return self._producer is not None and self._settings.direction == "push"

    def _progress(self, request_id: str, prefill: Prefill, end: int) -> None:
        if prefill.is_met is None:
            prefill.is_met = self._meets(request_id, prefill)
        count = min(end, prefill.token_count)
        if not prefill.is_met or count <= prefill.told_count:
            return
        prefill.told_count = count
        tables = self._covered(self._tables.tables(request_id), prefill.token_count)
        is_growing = [number not in self._shape.shrinking_groups for number in range(len(tables))]
        self._producer.progress(
            request_id,
            count,
            tuple(t if grows else () for t, grows in zip(tables, is_growing, strict=True)),
        )

    def _meets(self, request_id: str, prefill: Prefill) -> bool | None:
        """Whether it has an appointment. None while its adapter is looked at."""
        if prefill.ticket is not None:
            state = prefill.ticket.state(self._clock.now_s())
            if state is not TicketState.DONE:
                return None if state is TicketState.PENDING else False
        if not prefill.request.is_cacheable:
            return False
        prefix = RequestPrefix(prefill.request, prefill.request.tokens[: prefill.token_count])
        return self._producer.appointed(request_id, prefill.params, prefix)

    def _covered(self, tables: Sequence[Sequence[int]], token_count: int) -> Tables:
        """What a prompt needs of its tables."""
        return _tables(
            tuple(
                table[: -(-token_count // block_tokens)]
                for table, block_tokens in zip(tables, self._shape.group_block_tokens, strict=True)
            )
        )

    def build(self) -> Plans:
        """The plans of the step that vLLM's scheduler has just decided."""
        if self._producer is None:
            return Plans(consumer=self._consumer.plan()) if self._consumer else Plans()
        if self._consumer is None:
            return Plans(self._producer.plan())
        return Plans(self._producer.plan(), self._consumer.plan())

    @property
    def has_news(self) -> bool:
        """A step is needed even if nothing computes."""
        return self._producer is not None and self._producer.has_news

    def receive(self, report: Report) -> None:
        if self._consumer is not None:
            self._consumer.receive(report)

    def ended(self, sent: Sequence[str], loaded: Sequence[str], failed: Sequence[str]) -> None:
        """What all ranks have said. Other connectors' requests are ignored."""
        if self._producer is not None:
            self._producer.ended(sent)
        if self._consumer is not None:
            self._consumer.loaded(loaded, failed)

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Called before the blocks are freed; also for requests that never ran. What the client is
        to carry: its blocks are kept then until `ended`."""
        request_id = request.request_id
        self._computed.pop(request_id, None)
        if self._consumer is not None:
            self._consumer.finished(request_id)
        prefill = self._prefills.pop(request_id, None)
        token_count = request.num_prompt_tokens
        is_whole = request.status in COMPLETE and request.num_computed_tokens >= token_count
        if prefill is None:
            return None
        self._tables.finished(request_id)
        if not is_whole or not prefill.request.is_cacheable:
            self._producer.cancel(request_id)
            return None
        if prefill.ticket is not None and (
            prefill.ticket.state(self._clock.now_s()) is not TicketState.DONE
        ):
            self._metrics.count("kvferry_transfer_leases_total", outcome="unnamed")
            return None
        prefix = RequestPrefix(prefill.request, prefill.request.tokens[:token_count])
        covered = self._covered(tables, token_count)
        return self._producer.finished(request_id, request.kv_transfer_params, prefix, covered)

    def reset(self) -> bool:
        """The weights may have changed: see `weights_id`. False while blocks are kept that somebody
        may read: whoever asked tries again, and that is still the same reset."""
        if not self._is_resetting:
            name, self._weights_name = self._weights_name, None
            self._namespace = namespace_digest(
                {"after": self._namespace, "weights": name or self._clock.random_bytes(32)}
            )
            self._metrics.count("kvferry_namespace_resets_total")
        if self._consumer is not None:
            self._consumer.rename(self._namespace)
        if self._producer is not None:
            self._producer.rename(self._namespace)
            self._is_resetting = not self._producer.may_reset()
        return not self._is_resetting

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._runner.close(CLOSE_S)


def check_agreement(ranks: Sequence[Ready], rank_count: int) -> None:
    """All ranks are there, and are of one engine. Raises ConfigError."""
    if [ready.rank for ready in ranks] != list(range(rank_count)):
        raise ConfigError(
            "transfer.ranks",
            f"of {rank_count} ranks {[ready.rank for ready in ranks]} have said how to reach them",
        )
    for ready in ranks[1:]:
        for name in sorted(ready.fields.keys() | ranks[0].fields.keys()):
            if ready.fields.get(name) != ranks[0].fields.get(name):
                raise ConfigError(
                    "transfer.ranks",
                    f"ranks of this engine disagree on {name}: {ranks[0].fields.get(name)!r} on"
                    f" rank 0, {ready.fields.get(name)!r} on rank {ready.rank}",
                )


def _tables(tables: Sequence[Sequence[int]]) -> Tables:
    """Where a window has passed, vLLM has its null block."""
    return tuple(
        tuple(SKIP if block == NULL_BLOCK else block for block in table) for table in tables
    )
