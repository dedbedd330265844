"""How many tokens the store can give a request. One thread: the scheduler's.

A lookup is asked for once per request and kept until it was used or is void: after a load, after
`stale_s` (slots that were evicted since may be reused), or when the namespace changes.
"""

from collections.abc import Callable

from kvferry.catalog.base import Catalog
from kvferry.catalog.runner import Runner, TicketState
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.keys import DIGEST_BYTES
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Load, Part, Span
from kvferry.offload.chunks import first_needed_chunk, servable_boundary, span_blocks
from kvferry.offload.cost import CostModel
from kvferry.offload.lookup import Hasher, Lookup, PartAnswer
from kvferry.offload.record import Chain, Record

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
    ):
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._catalog = catalog
        self._runner = runner
        self._hasher = hasher
        self._cost = cost
        self._parts: tuple[Part, ...] = ()
        self._failed: dict[bytes, float] = {}  # key: not offered again until

    def use(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts

    def quarantine(self, key: bytes) -> None:
        self._failed[key] = self._clock.now_s() + self._config.failed_key_ttl_s

    def ask(self, record: Record) -> None:
        """Starts a lookup; the request waits for it until its deadline."""
        record.asked_count += 1
        record.answer = None
        record.deadline_s = self._clock.now_s() + self._config.lookup_deadline_s
        record.lookup = Lookup(self._catalog, self._hasher, self._parts, record.request)
        record.ticket = self._runner.submit(record.lookup.run, self._config.lookup_deadline_s)

    def match(self, record: Record, computed_tokens: int, total_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: ask again in the next step."""
        record.local_tokens = computed_tokens
        if not record.request.is_readable:
            return 0
        if not self._is_answered(record):
            return None
        if record.answer is None:
            return 0
        answers = self._trusted(record.answer)
        limit = total_tokens if len(self._parts) == 1 else total_tokens - 1
        runs = [answer.runs for answer in answers]
        boundary = servable_boundary(self._parts, runs, computed_tokens, limit)
        found = boundary - computed_tokens
        return found if found and self._is_worth_it(found) else 0

    def _is_answered(self, record: Record) -> bool:
        """True if the request need not wait; its answer is there unless there is none."""
        now_s = self._clock.now_s()
        if record.answer is not None:
            if now_s - record.answered_s < self._config.grace_s:
                return True
            record.ticket = None
        if record.ticket is None:
            if not self._parts:
                return now_s >= record.deadline_s
            if record.asked_count >= ASKS_MAX:
                return True
            self.ask(record)
        return self._settle(record, now_s)

    def _settle(self, record: Record, now_s: float) -> bool:
        state = record.ticket.state(now_s)
        if state is TicketState.PENDING:
            return False
        if state is TicketState.DONE:
            if record.answer is None:
                record.answer = record.ticket.value
                record.answered_s = now_s
                self.adopt_keys(record)
                self._touch(record.answer)
                self._count(record)
        elif record.asked_count < ASKS_MAX:
            late = state is TicketState.LATE
            self._metrics.count("kvferry_lookups_total", outcome="late" if late else "unavailable")
            record.asked_count = ASKS_MAX  # it goes on without
        return True

    def adopt_keys(self, record: Record) -> None:
        """Takes over the keys that the lookup has hashed, and what it found."""
        if record.lookup is None or record.lookup.keys is None:
            return
        if not record.chains:
            record.chains = [Chain(keys=keys) for keys in record.lookup.keys]
        for chain, answer in zip(record.chains, record.answer or (), strict=False):
            hits = (i for i, is_hit in enumerate(answer.is_hit) if is_hit)
            chain.present.update(i for i in hits if answer.key(i) not in self._failed)

    def _trusted(self, answers: tuple[PartAnswer, ...]) -> tuple[PartAnswer, ...]:
        """The answers without keys that failed a short while ago."""
        now_s = self._clock.now_s()
        self._failed = {key: until for key, until in self._failed.items() if until > now_s}
        if not self._failed:
            return answers
        return tuple(
            answer.without([i for i in range(len(answer.is_hit)) if answer.key(i) in self._failed])
            for answer in answers
        )

    def _is_worth_it(self, token_count: int) -> bool:
        if token_count < self._config.load_tokens_min:
            self._metrics.count("kvferry_loads_declined_total", reason="short")
            return False
        if not self._cost.pays(self._parts, token_count):
            self._metrics.count("kvferry_loads_declined_total", reason="cost")
            return False
        return True

    def _touch(self, answers: tuple[PartAnswer, ...]) -> None:
        for part, answer in zip(self._parts, answers, strict=True):
            if any(answer.is_hit):
                self._runner.submit(self._toucher(part, answer), self._config.store_deadline_s)

    def _toucher(self, part: Part, answer: PartAnswer) -> Callable[[], None]:
        def touch() -> None:
            keys = [answer.key(i) for i, is_hit in enumerate(answer.is_hit) if is_hit]
            self._catalog.touch(part.namespace, keys)

        return touch

    def _count(self, record: Record) -> None:
        if record.asked_count > 1 or not self._parts:
            return
        part, answer = self._parts[0], record.answer[0]
        hit_count = answer.runs.ahead[0] if answer.runs.ahead else 0
        self._metrics.count("kvferry_lookups_total", outcome="hit" if hit_count else "miss")
        self._metrics.count("kvferry_lookup_tokens_total", len(answer.is_hit) * part.chunk_tokens)
        self._metrics.count("kvferry_hit_tokens_total", hit_count * part.chunk_tokens)

    def load(self, record: Record, tables: list[list[int]], external_tokens: int) -> Load:
        """The load of `external_tokens` after the request's local ones; uses up the answer."""
        start, end = record.local_tokens, record.local_tokens + external_tokens
        spans = [
            self._span(index, answer, tables, start, end)
            for index, answer in enumerate(record.answer)
        ]
        record.loaded_end = end
        record.answer = record.ticket = None
        return Load(record.request_id, tuple(spans), start, end, self._config.load_deadline_s)

    def _span(
        self, index: int, answer: PartAnswer, tables: list[list[int]], start: int, end: int
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
