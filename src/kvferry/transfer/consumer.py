"""The consumer's scheduler half: one record, with one state, for each request that brings an offer.

    CHECKING  is the offer about these very tokens? (the runner's thread hashes them; an
              appointment is about whatever tokens the request has)
    CLAIMING  all ranks are told; the scheduler asks again until all have it granted
    READY     how many tokens it may have is known
    LOADING   blocks were allocated, all ranks read
    OVER      nothing (more) is loaded for it: an ordinary request

Every way leads to OVER: a client's nonsense, another text, a full local hit, a short rest, a
producer that is gone, an abort, a deadline. From CLAIMING on the ranks are told when a request lets
go. One thread: the scheduler's. Nothing here waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from msgspec.structs import replace

from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.metrics import Metrics
from kvferry.transfer.halves import ConsumerPlan, Load, Report, Tables, Watch
from kvferry.transfer.params import Offer, read, read_appointment
from kvferry.transfer.producer import Prefix, prefix_key
from kvferry.transfer.settings import Settings


class State(Enum):
    """See the module."""

    CHECKING = "checking"
    CLAIMING = "claiming"
    READY = "ready"
    LOADING = "loading"
    OVER = "over"


@dataclass(slots=True)
class Record:
    """`token_count`: what may be loaded, never the prompt's last token, which the engine computes
    in any case. `granted_count`: ranks that have it. `since_s`: when it came, or was admitted."""

    request_id: str
    offer: Offer
    token_count: int
    deadline_s: float
    ticket: Ticket
    since_s: float
    state: State = State.CHECKING
    granted_count: int = 0


class Consumer:
    """See the module. `namespace`: digest of this engine's compatibility fields."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        runner: Runner,
        namespace: bytes,
        rank_count: int,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._runner = runner
        self._namespace = namespace
        self._rank_count = rank_count
        self._records: dict[str, Record] = {}
        self._watches: list[Watch] = []
        self._loads: list[Load] = []
        self._drops: list[str] = []
        self._must_void = False
        self._is_full = False
        self._step_s = float("-inf")

    @property
    def record_count(self) -> int:
        return len(self._records)

    def on_new_request(self, request_id: str, params: Any, prefix: Prefix) -> None:
        """`params`: what the client sent, whatever it is. `prefix`: the whole prompt."""
        offer, reason = self._offer(params, prefix)
        if offer is None:
            if reason != "absent":
                self._count(reason)
            return
        if offer.namespace != self._namespace:
            self._count("namespace")
        elif offer.token_count > len(prefix.tokens):
            self._count("tokens")
        else:
            deadline_s = self._settings.claim_deadline_s
            ticket = self._runner.submit(
                lambda: prefix_key(offer.namespace, prefix, offer.token_count), deadline_s
            )
            now_s = self._clock.now_s()
            token_count = min(offer.token_count, len(prefix.tokens) - 1)
            self._records[request_id] = Record(
                request_id, offer, token_count, now_s + deadline_s, ticket, now_s
            )

    def _offer(self, params: Any, prefix: Prefix) -> tuple[Offer | None, str]:
        """Of an appointment: about the whole prompt, with the key that it turns out to have."""
        offer, reason = read_appointment(self._settings.secret, params)
        if offer is None:
            return read(self._settings.secret, params) if reason == "absent" else (None, reason)
        if self._settings.direction != "push":
            return None, "direction"
        return replace(offer, token_count=len(prefix.tokens), key=b""), ""

    def matched(self, request_id: str, computed_tokens: int) -> int | None:
        """How many tokens after `computed_tokens` can be loaded; None: ask again."""
        record = self._records.get(request_id)
        if record is None or record.state in (State.OVER, State.LOADING):
            return 0
        if record.state is State.CLAIMING and self._step_s <= record.deadline_s:
            return None  # all waiting requests are asked in each step
        self._advance(record)
        if record.state is State.OVER:
            return 0
        if record.state is not State.READY:
            return None
        count = record.token_count - computed_tokens
        if count < self._settings.tokens_min:
            self._finish(record, "local_hit" if count <= 0 else "short")
            return 0
        return count

    def allocated(
        self, request_id: str, tables: Tables, computed_tokens: int, external_tokens: int
    ) -> bool:
        """The scheduler has admitted the request. True if its ranks will load `external_tokens`
        after `computed_tokens` into these blocks, and report when they have."""
        record = self._records.get(request_id)
        if record is None or record.state in (State.OVER, State.LOADING):
            return False
        if record.state is not State.READY or external_tokens <= 0:
            self._finish(record, "declined")
            return False
        record.state, record.since_s = State.LOADING, self._clock.now_s()
        end = computed_tokens + external_tokens
        self._loads.append(Load(request_id, tables, computed_tokens, end))
        return True

    def plan(self) -> ConsumerPlan:
        """What ranks must know since the last step. Each step, also without requests."""
        self._step_s = self._clock.now_s()
        for record in list(self._records.values()):
            if record.state is State.CHECKING:
                self._advance(record)
        waiting_count = sum(r.state is not State.OVER for r in self._records.values())
        self._metrics.set("kvferry_transfer_requests_waiting", waiting_count)
        plan = ConsumerPlan(
            tuple(self._watches), tuple(self._loads), tuple(self._drops), self._must_void
        )
        self._watches, self._loads, self._drops = [], [], []
        self._must_void = False
        return plan

    def receive(self, report: Report) -> None:
        """Of all ranks in one step, merged."""
        self._is_full = report.is_full
        for request_id in report.granted:
            record = self._records.get(request_id)
            if record is not None and record.state is State.CLAIMING:
                record.granted_count += 1
                if record.granted_count == self._rank_count:
                    record.state = State.READY
                    self._observe("kvferry_transfer_wait_seconds", record)
        for request_id, reason in report.refused:
            record = self._records.get(request_id)
            if record is not None and record.state in (State.CLAIMING, State.READY):
                self._finish(record, reason)

    def loaded(self, request_ids: Sequence[str], failed: Sequence[str]) -> None:
        """All ranks have said that these loads have ended. Others' requests are ignored."""
        for request_id in request_ids:
            record = self._records.get(request_id)
            if record is not None and record.state is State.LOADING:
                record.state = State.OVER
                self._observe("kvferry_transfer_load_seconds", record)
                self._count("failed" if request_id in failed else "loaded")

    def finished(self, request_id: str) -> bool:
        """The request is done or aborted, in any state. True if its ranks still load: its blocks
        must be kept until they have reported it."""
        record = self._records.pop(request_id, None)
        if record is None or record.state is State.OVER:
            return False
        is_loading = record.state is State.LOADING
        if is_loading:
            self._drops.append(request_id)
            self._count("aborted")
        else:
            self._finish(record, "aborted")
        return is_loading

    def rename(self, namespace: bytes) -> None:
        """The engine is another one now (its weights have changed). Nothing is loaded any more for
        requests that came before; loads under way are failed by their ranks."""
        self._namespace = namespace
        self._must_void = True
        for record in self._records.values():
            if record.state not in (State.OVER, State.LOADING):
                self._finish(record, "namespace")

    def _advance(self, record: Record) -> None:
        now_s = self._clock.now_s()
        if record.state is State.CHECKING:
            state = record.ticket.state(now_s)
            key = record.ticket.value
            if state is TicketState.DONE and _is_about(record.offer, key):
                record.offer = replace(record.offer, key=key)
                self._watches.append(Watch(record.request_id, record.offer))
                record.state = State.CLAIMING
            elif state is TicketState.DONE:
                self._finish(record, "other_text")
            elif state is not TicketState.PENDING:
                self._finish(record, "late")
        if record.state in (State.CHECKING, State.CLAIMING) and now_s > record.deadline_s:
            self._finish(record, "late")
        if record.state is State.READY and self._is_full:
            self._finish(record, "quarantine")

    def _finish(self, record: Record, reason: str) -> None:
        """Nothing is loaded for it. Its ranks let go, if they have heard of it."""
        if record.state in (State.CLAIMING, State.READY):
            self._drops.append(record.request_id)
        record.state = State.OVER
        self._count(reason)

    def _observe(self, name: str, record: Record) -> None:
        self._metrics.observe(name, self._clock.now_s() - record.since_s)

    def _count(self, outcome: str) -> None:
        self._metrics.count("kvferry_transfer_requests_total", outcome=outcome)


def _is_about(offer: Offer, key: bytes | None) -> bool:
    """`key`: of the request's own tokens, if anything names them."""
    return key is not None and offer.key in (b"", key)
