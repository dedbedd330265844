"""How many tokens the store can give a request. One thread: the scheduler's.

A lookup is asked for once per request and kept until it was used or is void: after a load, after
`stale_s` (slots that were evicted since may be reused), or when the namespace changes.
"""

import functools
from collections.abc import Callable

from kvferry.catalog.base import Catalog
from kvferry.catalog.runner import Runner, TicketState
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.keys import DIGEST_BYTES
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Load, Part, Span, Tables
from kvferry.offload.chunks import first_needed_chunk, servable_boundary, span_blocks
from kvferry.offload.scheduler.cost import CostModel
from kvferry.offload.scheduler.lookup import Hasher, Lookup, PartAnswer, pieces
from kvferry.offload.scheduler.quarantine import Quarantine
from kvferry.offload.scheduler.record import Chain, Record

ASKS_MAX = 64
"""Lookups of one request at most: one that is preempted for ever must not flood the catalog."""


class Matcher:
    def __init__(
        self,
        config: Config,
        clock: Clock,
        metrics: Metrics,
        catalog: Catalog,
        runner: Runner,
        hasher: Hasher,
        cost: CostModel,
        quarantine: Quarantine,
    ):
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._catalog = catalog
        self._runner = runner
        self._hasher = hasher
        self._cost = cost
        self._quarantine = quarantine
        self._parts: tuple[Part, ...] = ()
        self._waits_for_ranks = True

    def use(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts

    def stop_waiting(self) -> None:
        """The ranks will not agree: no request waits for that."""
        self._waits_for_ranks = False

    def ask(self, record: Record) -> None:
        """Starts a lookup; the request waits for it until its deadline."""
        record.asked_count += 1
        record.answer, record.is_declined = None, False
        record.deadline_s = self._clock.now_s() + self._config.lookup_deadline_s
        record.lookup = Lookup(
            self._catalog, self._hasher, self._clock, self._parts, record.request
        )
        is_first = record.asked_count == 1
        work = functools.partial(self._look_up, record.lookup, self._clock.now_s(), is_first)
        record.ticket = self._runner.submit(work, self._config.lookup_deadline_s)

    def match(self, record: Record, computed_tokens: int, total_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: ask again in the next step."""
        record.local_tokens, record.loaded_end = computed_tokens, 0
        request = record.request
        if not (request.is_cacheable and request.is_readable):
            return 0
        if not self._is_answered(record):
            return None
        if record.answer is None:
            return 0
        answers = self._trusted(record)
        for answer in answers:
            if not answer.hits:
                return 0
        limit = total_tokens if len(self._parts) == 1 else total_tokens - 1
        runs = [answer.runs for answer in answers]
        boundary = servable_boundary(self._parts, runs, computed_tokens, limit)
        found = boundary - computed_tokens
        if found and not record.is_declined:
            record.is_declined = not self._is_worth_it(found)
        return 0 if record.is_declined else found

    def _is_answered(self, record: Record) -> bool:
        """True if the request need not wait; its answer is there unless there is none."""
        now_s = self._clock.now_s()
        if record.answer is not None:
            if now_s - record.answered_s < self._config.grace_s:
                return True
            record.answer = record.ticket = None
        if not self._parts:
            return self._need_not_wait_for_ranks(record, now_s)
        if record.ticket is None:
            if record.asked_count >= ASKS_MAX:
                return True
            self.ask(record)
        return self._settle(record, now_s)

    def _need_not_wait_for_ranks(self, record: Record, now_s: float) -> bool:
        """They agree in the first steps; if they do not, one deadline of waiting is enough."""
        if now_s >= record.deadline_s:
            self._waits_for_ranks = False
        return not self._waits_for_ranks

    def _settle(self, record: Record, now_s: float) -> bool:
        state = record.ticket.state(now_s)
        if state is TicketState.PENDING:
            return False
        if state is TicketState.DONE:
            if record.answer is None:
                record.answer, record.answer_version = record.ticket.value, 0
                record.answered_s = now_s
                if record.chains:
                    self._trusted(record)
                    self.adopt_keys(record)
        elif record.asked_count < ASKS_MAX:
            late = state is TicketState.LATE
            self._metrics.count("kvferry_lookups_total", outcome="late" if late else "unavailable")
            record.asked_count = ASKS_MAX  # it goes on without
        return True

    def adopt_keys(self, record: Record) -> None:
        """Takes over the keys that the lookup has hashed, and what it found."""
        if record.lookup is None or record.lookup.names is None:
            return
        if not record.chains:
            record.chains = [Chain(names) for names in record.lookup.names]
        for chain, answer in zip(record.chains, record.answer or (), strict=False):
            chain.present = chain.present | answer.hits if chain.present else answer.hits
            if chain.next_store < len(answer):
                chain.next_store += answer.runs.ahead[chain.next_store]

    def _trusted(self, record: Record) -> tuple[PartAnswer, ...]:
        """The answer without keys that failed a short while ago."""
        if record.answer_version != self._quarantine.version:
            record.answer_version = self._quarantine.version
            record.answer = tuple(
                answer.without(self._quarantine.among(answer.hit_by_key))
                for answer in record.answer
            )
        return record.answer

    def _is_worth_it(self, token_count: int) -> bool:
        if token_count < self._config.load_tokens_min:
            self._metrics.count("kvferry_loads_declined_total", reason="short")
            return False
        if not self._cost.pays():
            self._metrics.count("kvferry_loads_declined_total", reason="cost")
            return False
        return True

    def load(self, record: Record, tables: Tables, external_tokens: int) -> Load:
        """The load of `external_tokens` after the request's local ones; uses up the answer."""
        start, end = record.local_tokens, record.local_tokens + external_tokens
        spans = [
            self._span(index, answer, tables, start, end)
            for index, answer in enumerate(record.answer)
        ]
        record.loaded_end = end
        self.adopt_keys(record)
        record.answer = record.ticket = None
        return Load(record.request_id, tuple(spans), start, end, self._config.load_deadline_s)

    def _span(
        self,
        index: int,
        answer: PartAnswer,
        tables: Tables,
        start: int,
        end: int,
    ) -> Span:
        part = self._parts[index]
        first = first_needed_chunk(part, start, end)
        last = -(-end // part.chunk_tokens)
        keys = answer.keys[first * DIGEST_BYTES : last * DIGEST_BYTES]
        parent = answer.key(first - 1) if first else bytes(DIGEST_BYTES)
        slots = answer.slots[first * SLOT.size : last * SLOT.size]
        width = part.chunk_tokens // part.block_tokens
        blocks = span_blocks(part, tables[part.group_index], first, last)
        blocks += (0,) * ((last - first) * width - len(blocks))
        return Span(index, first, parent, keys, slots, blocks)

    # The runner's thread: what does not have to be done on the scheduler's

    def _look_up(self, lookup: Lookup, asked_s: float, is_first: bool) -> tuple[PartAnswer, ...]:
        answers = lookup.run()
        self._metrics.observe("kvferry_lookup_seconds", self._clock.now_s() - asked_s)
        if is_first:
            self._count(lookup, answers[0])
        for part, answer in zip(lookup.parts, answers, strict=True):
            if answer.hits:
                self._runner.submit(self._toucher(part, answer), self._config.store_deadline_s)
        return answers

    def _toucher(self, part: Part, answer: PartAnswer) -> Callable[[], None]:
        def touch() -> None:
            keys = list(answer.hit_by_key)
            for piece in pieces(len(keys), self._clock):
                self._catalog.touch(part.namespace, keys[piece.start : piece.stop])

        return touch

    def _count(self, lookup: Lookup, answer: PartAnswer) -> None:
        if lookup.names is None:
            self._metrics.count("kvferry_lookups_total", outcome="skipped")
            return
        part = lookup.parts[0]
        hit_count = answer.runs.ahead[0] if answer.runs.ahead else 0
        self._metrics.count("kvferry_lookups_total", outcome="hit" if hit_count else "miss")
        self._metrics.count("kvferry_lookup_tokens_total", len(answer) * part.chunk_tokens)
        self._metrics.count("kvferry_hit_tokens_total", hit_count * part.chunk_tokens)
