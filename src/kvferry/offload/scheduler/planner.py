"""The scheduler half: what to look up, load, reserve and store. Nothing here blocks.

Life of a request:

1. `on_new_request`: its lookup goes to the runner thread (once all ranks have said who they are).
2. `match`: None while the answer is pending and its deadline has not passed, else a number.
3. `allocated`: if the engine took the offer, a load joins the next plan.
4. `build`: each step's plan: loads, stores of chunks that the step completes, and the blocks that
   it may overwrite.
5. `finished`: chunks that are complete but not planned yet join the next plan.

One thread: the scheduler's. The catalog and the page store are touched by the runner alone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.catalog.base import Catalog
from kvferry.catalog.runner import Runner
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.errors import IncompatibleError
from kvferry.keys import tenant_id
from kvferry.metrics import Metrics
from kvferry.offload.base import Load, Plan, Report, Request, Step, Store, Tables
from kvferry.offload.scheduler.agreement import Agreement
from kvferry.offload.scheduler.announcer import Announcer, Describe
from kvferry.offload.scheduler.cost import PREFILL_TOKENS_MIN, CostModel
from kvferry.offload.scheduler.due import Due
from kvferry.offload.scheduler.lookup import Hasher
from kvferry.offload.scheduler.matcher import Matcher
from kvferry.offload.scheduler.origin import Origins
from kvferry.offload.scheduler.quarantine import Quarantine
from kvferry.offload.scheduler.record import Record
from kvferry.offload.scheduler.store_planner import StorePlanner
from kvferry.offload.space.growth import Growth
from kvferry.offload.space.room import Room
from kvferry.offload.space.supply import Supply
from kvferry.pages.base import PageStore, StoreFacts

log = logging.getLogger(__name__)

NEVER_TOKENS = 1 << 62
TOGETHER_TOKENS = 256
"""Where many decode, so many tokens of a request are stored together, if its chunks are shorter:
a look at it costs more than what is planned in it."""
UNHASHED_STEPS = 32
"""Whose lookup was late or failed may never have keys: it is looked at so seldom."""


class Planner:
    """See the module. `facts`: what the opened page store said. `may_reserve`: whether the catalog
    still owns the store's slots. `describe`: what is told of what is stored; None: nothing is.
    `closers` run in order at `close`."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        metrics: Metrics,
        catalog: Catalog,
        pages: PageStore,
        facts: StoreFacts,
        runner: Runner,
        growth: Growth,
        hasher: Hasher,
        rank_count: int,
        may_reserve: Callable[[], bool] = lambda: True,
        describe: Describe | None = None,
        closers: Sequence[Callable[[], None]] = (),
    ):
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._agreement = Agreement(rank_count, facts.store_id)
        self._cost = CostModel(config.cost_model)
        self._quarantine = Quarantine(clock, config.failed_key_ttl_s)
        self._matcher = Matcher(
            config, clock, metrics, catalog, runner, hasher, self._cost, self._quarantine
        )
        self._announcer: Announcer | None = None
        if describe is not None:
            ended_s = 2 * config.store_deadline_s  # written, and committed
            self._announcer = Announcer(catalog, clock, metrics, describe, ended_s)
        self._stores = StorePlanner(
            hasher, metrics, self._quarantine, config.store_deadline_s, self._announcer
        )
        room = Room(catalog, pages, facts, growth, clock, metrics, tenant_id(config.tenant))
        self._supply = Supply(config, clock, metrics, facts, runner, room, may_reserve)
        self._origins = Origins()
        self._weights_name = config.weights_id
        self._records: dict[str, Record] = {}
        self._due = Due()
        self._has_window = False
        self._held_tokens = 0
        self._closers = list(closers)
        self._loads: list[Load] = []
        self._admitted: dict[str, Tables] = {}
        self._late_stores: list[Store] = []
        self._must_drop = False
        self._last_prefill: tuple[float, int] | None = None
        self._answered_id: str | None = None
        self._makes_way = False

    # What the engine tells

    def on_new_request(self, request: Request) -> None:
        deadline_s = self._clock.now_s() + self._config.lookup_deadline_s
        record = Record(request.request_id, request, deadline_s)
        self._records[record.request_id] = record
        if not request.is_cacheable:
            self._metrics.count("kvferry_lookups_total", outcome="skipped")
        elif self._agreement.parts:
            self._begin(record)
        self._due.soon(record.request_id)

    def match(self, request_id: str, computed_tokens: int, total_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: ask again, the answer is
        pending, or others have to come first who hold blocks (see `_note_jam`)."""
        if self._makes_way:
            return None
        found = self._match(request_id, computed_tokens, total_tokens)
        if found is not None:
            self._answered_id = request_id
        return found

    def _match(self, request_id: str, computed_tokens: int, total_tokens: int) -> int | None:
        record = self._records.get(request_id)
        if record is None:
            return 0
        if record.computed_tokens or record.loaded_end or not record.is_storable:
            self._evacuate(record)
        found = self._matcher.match(record, computed_tokens, total_tokens)
        return None if self._supply.refills and self._waits_for_slots(record) else found

    def allocated(self, request_id: str, tables: Tables, external_tokens: int) -> None:
        """The engine admitted the request, with `external_tokens` of ours (0: none taken)."""
        if request_id == self._answered_id:
            self._answered_id = None
        record = self._records.get(request_id)
        if record is None:
            return
        self._admitted[request_id] = tables
        if external_tokens == 0 or record.answer is None:
            return
        self._loads.append(self._matcher.load(record, tables, external_tokens))

    def build(self, step: Step) -> Plan:
        """The plan of this step."""
        now_s = self._clock.now_s()
        token_count = step.token_count
        self._note_jam(step)
        if self._last_prefill is not None or token_count >= PREFILL_TOKENS_MIN:
            self._measure(token_count, now_s)
        supply = self._supply
        if supply.refills and supply.collect(now_s):
            self._due.release()
        self._origins.allocated(step.new_blocks)
        due = self._due.take(step.scheduled_tokens, token_count)
        stores = self._look_at(due, step, now_s) if due else []
        for request_id in step.preempted:
            if request_id in self._records:
                self._evacuate(self._records[request_id])
        if self._admitted:
            self._note_parked(step)
        if supply.is_due or now_s >= supply.check_at_s:
            supply.refill(now_s)
        return self._take_plan(step, stores, now_s)

    def _look_at(self, due: set[str], step: Step, now_s: float) -> list[Store]:
        stores: list[Store] = []
        records = [self._records[name] for name in due if name in self._records]
        for record in in_order(step.request_ids, records):
            stores += self._look(record, step, now_s)
        self._supply.watch()
        return stores

    def finished(self, request_id: str, tables: Tables | None = None) -> None:
        """The request ended, for whatever reason. `tables`: its blocks, if it still has them."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        self._due.forget(request_id)
        self._foresee(record, 0)
        end = len(record.request.tokens) - 1
        if not record.is_decoding:
            end = min(end, record.computed_tokens)
        if tables is not None and record.is_storable and end >= record.next_boundary:
            self._store_late(record, tables, end)
        if not self._records:  # what follows is idleness, not prefill
            self._last_prefill = None

    def _store_late(self, record: Record, tables: Tables, end_tokens: int) -> None:
        self._matcher.adopt_keys(record)
        now_s = self._clock.now_s()
        if self._supply.refills and self._supply.collect(now_s):
            self._due.release()  # reserved while its prompt was computed, perhaps in one step
        self._late_stores += self._stores.plan(record, tables, end_tokens, now_s)
        self._supply.watch()
        self._stores.count_missed(record, end_tokens, now_s)

    def receive(self, report: Report) -> None:
        """What the workers say: who they are, and which keys failed."""
        for identity in report.identities:
            try:
                if self._agreement.add(identity):
                    self._begin_all()
            except IncompatibleError as error:
                self._metrics.count("kvferry_identity_refusals_total")
                self._matcher.stop_waiting()
                log.error("kvferry stands aside: %s", error)
        self._cost.saw_load(report.loaded_tokens, report.loading_s)
        self._metrics.set("kvferry_load_tokens_per_second", self._cost.load_tokens_per_s)
        self._metrics.set("kvferry_prefill_tokens_per_second", self._cost.prefill_tokens_per_s)
        for _, key in report.failed_keys:
            self._quarantine.add(key)
            self._stores.forget(key)
        if report.failed_keys:
            self._revisit_loading()

    def reset(self) -> None:
        """The weights may have changed: nothing stored so far is offered or added to. After the
        first time the weights are those that `weights_id` names, later nobody knows them."""
        self._metrics.count("kvferry_namespace_resets_total")
        self._must_drop = True
        self._late_stores = []
        self._origins.forget()
        self._supply.give_back()
        if self._announcer is not None:
            self._announcer.forget()
        name, self._weights_name = self._weights_name, None
        self._agreement.rename(name.encode() if name else self._clock.random_bytes(32))
        for record in self._records.values():
            record.lookup = record.ticket = record.answer = None
            record.chains = []
            if record.has_begun:
                record.is_storable = False
                self._look_soon(record)
        if self._agreement.parts:
            self._begin_all()

    def close(self) -> None:
        """Gives the reserved slots back, as far as the runner still gets to it. Idempotent."""
        self._supply.give_back()
        self._records.clear()
        closers, self._closers = self._closers, []
        for close in closers:
            close()

    def tend(self) -> None:
        """Ends leases, keeps room ahead of need, and finds out what there is to tell. On the
        runner's thread, every second."""
        self._supply.tend()
        if self._announcer is not None:
            self._announcer.review()

    def take_events(self) -> list[Any]:
        """What there is to tell of the store since the last call, in order: see `announcer`."""
        return self._announcer.take() if self._announcer is not None else []

    def is_idle(self) -> bool:
        """Nothing is left but the reservation pool."""
        return not (self._records or self._loads or self._late_stores)

    # Requests

    def _begin_all(self) -> None:
        parts = self._agreement.parts
        self._matcher.use(parts)
        self._stores.use(parts)
        self._has_window = any(part.window_tokens is not None for part in parts)
        self._held_tokens = max(0, TOGETHER_TOKENS - max(part.chunk_tokens for part in parts))
        self._origins.agree(parts)
        self._supply.use(parts, self._stores.pools)
        for record in self._records.values():
            self._look_soon(record)
            if record.request.is_cacheable:
                self._begin(record)

    def _begin(self, record: Record) -> None:
        self._matcher.ask(record)
        self._foresee(record, len(record.request.tokens))
        self._supply.prepare()

    def _foresee(self, record: Record, tokens: int) -> None:
        """Notes how many tokens the request may still store, as far as they are known now."""
        self._supply.foresee(tokens - record.in_sight_tokens)
        record.in_sight_tokens = tokens

    def _waits_for_slots(self, record: Record) -> bool:
        """While slots are being reserved: the first request of an idle engine finds none. They come
        with its lookup's answer; what it computes before could not be stored later if it has a
        window."""
        is_short = not all(self._stores.pools)
        return is_short and record.asked_count == 1 and self._clock.now_s() < record.deadline_s

    def _revisit_loading(self) -> None:
        """Pages could not be loaded: who waits for them computes and stores them again."""
        for record in self._records.values():
            if record.loaded_end and not record.is_scheduled:
                self._look_soon(record)
                for part, chain in zip(self._agreement.parts, record.chains, strict=False):
                    first = record.local_tokens // part.chunk_tokens
                    chain.next_store = min(chain.next_store, first)

    def _evacuate(self, record: Record) -> None:
        """The request has no blocks: it was preempted, or has not begun."""
        record.is_scheduled, record.is_storable, record.is_decoding = False, True, False
        self._look_soon(record)
        record.computed_tokens = record.loaded_end = 0

    def _look_soon(self, record: Record) -> None:
        record.next_boundary = 0
        self._due.soon(record.request_id)

    # Steps

    def _note_jam(self, step: Step) -> None:
        """Where a request that has its answer finds no room, vLLM before 0.32 looks at none behind
        it: also not at those whose loads have ended, and they hold the blocks. If nothing runs,
        that is for ever; and so it is if one that fits runs, finds no room to go on, gives up its
        blocks and is the first to get them again. So after such a step no request without blocks
        is answered in the next one, and vLLM comes to the others."""
        is_stuck = self._answered_id is not None and step.token_count == 0
        self._makes_way = is_stuck or (bool(step.preempted) and self._has_loaded())
        self._answered_id = None

    def _has_loaded(self) -> bool:
        """Whether a request has been given blocks for a load and has not run since."""
        return any(r.loaded_end and not r.is_scheduled for r in self._records.values())

    def _look(self, record: Record, step: Step, now_s: float) -> list[Store]:
        """At a request that is due."""
        computed = step.computed_tokens[record.place]
        end = record.computed_tokens = computed + step.scheduled_tokens[record.request_id]
        token_count = len(record.request.tokens)
        record.is_decoding = end >= token_count
        if not record.is_scheduled:
            record.is_scheduled = True
            self._note_origin(record, computed, self._tables(record, step))
            if record.is_decoding and record.is_storable and self._may_wait:
                self._due.after(record.request_id, 1)  # with those of others, a few steps later
                return []
        stores: list[Store] = []
        if min(end, token_count) >= record.next_boundary:
            stores = self._advance(record, computed, token_count, step, now_s)
        if 0 < record.next_boundary <= min(end, token_count):  # no slot was left
            self._due.wait(record.request_id)
        elif record.is_storable and not (record.chains or record.next_boundary):
            self._due.after(record.request_id, UNHASHED_STEPS)
        elif record.next_boundary < NEVER_TOKENS:
            held_tokens = self._held_tokens if record.is_decoding and self._may_wait else 0
            self._due.after(record.request_id, record.next_boundary + held_tokens - end)
        return stores

    def _tables(self, record: Record, step: Step) -> Tables:
        return self._admitted.get(record.request_id) or step.tables(record.request_id)

    @property
    def _may_wait(self) -> bool:
        """Blocks before a window are gone in the next step."""
        return self._due.are_many and not self._has_window

    def _advance(
        self, record: Record, computed: int, token_count: int, step: Step, now_s: float
    ) -> list[Store]:
        """Of a request that has no boundary yet, completes a chunk, or must be looked at in each
        step (`next_boundary` 0). `token_count`: known tokens."""
        end, tables = record.computed_tokens, self._tables(record, step)
        if not record.is_storable:
            self._origins.disown(tables, computed, end)
            return []
        if not record.request.is_cacheable:
            record.next_boundary = NEVER_TOKENS
            return []
        if not record.chains:
            self._matcher.adopt_keys(record)
        if not record.chains:  # not hashed yet, or never: the catalog was away
            return []
        stores = self._stores.plan(record, tables, min(end, token_count), now_s)
        if record.in_sight_tokens or token_count > record.next_boundary:
            self._foresee(record, max(0, token_count - record.next_boundary))
        return stores

    def _note_origin(self, record: Record, computed_tokens: int, tables: Tables) -> None:
        """Of a request that was just admitted. What lies between what the engine had and what it
        computes first, and was not loaded by us, a sibling connector has loaded."""
        is_known = computed_tokens <= max(record.local_tokens, record.loaded_end)
        if not (is_known and self._origins.are_ours(tables, computed_tokens)):
            record.is_storable = False
            self._origins.disown(tables, record.local_tokens, computed_tokens)

    def _note_parked(self, step: Step) -> None:
        """Of requests that were admitted and compute nothing yet: they wait for a load. A load of
        ours on top of a foreign prefix does not make a prefix of ours."""
        for request_id, tables in self._admitted.items():
            record = self._records.get(request_id)
            is_parked = request_id not in step.scheduled_tokens
            if is_parked and record is not None and not record.is_scheduled:
                local_tokens = record.local_tokens
                if not (record.loaded_end and self._origins.are_ours(tables, local_tokens)):
                    self._origins.disown(tables, local_tokens, NEVER_TOKENS)
        self._admitted = {}

    def _take_plan(self, step: Step, stores: list[Store], now_s: float) -> Plan:
        plan = Plan(
            parts=self._agreement.namespaces,
            stores=tuple(stores),
            late_stores=tuple(self._late_stores),
            loads=tuple(self._loads),
            overwritten=tuple(step.new_blocks),
            drop_stores=self._must_drop,
            rewritten=tuple(step.rewritten),
            tries_store=self._cost.wants_trial(now_s),
        )
        self._loads, self._late_stores = [], []
        self._must_drop = False
        return plan

    def _measure(self, token_count: int, now_s: float) -> None:
        """Prefill speed: tokens of the last step, if it had many, by the time until this one."""
        if self._last_prefill is not None:
            started_s, tokens = self._last_prefill
            self._cost.saw_step(tokens, now_s - started_s)
        self._last_prefill = (now_s, token_count) if token_count >= PREFILL_TOKENS_MIN else None


def in_order(request_ids: Sequence[str], records: list[Record]) -> list[Record]:
    """These requests in the order in which they stand among all of a step. Sets their places:
    most are where they were, or new and last."""
    last = len(request_ids) - 1
    places: dict[str, int] = {}
    for record in records:
        place = min(record.place, last) if record.place >= 0 else last
        if request_ids[place] != record.request_id:
            places = places or {request_id: at for at, request_id in enumerate(request_ids)}
            place = places[record.request_id]
        record.place = place
    if len(records) > 1:
        records.sort(key=lambda record: record.place)
    return records
