"""vLLM's scheduler in small: it decides what each step computes, and asks the planner as vLLM does.

Chunked prefill within a budget of tokens, preemption of the last request when blocks run out,
loads that requests wait for, speculation, and one step of latency in asynchronous mode. As in
vLLM, whoever waits is admitted only if all of its tokens have room, a load only if those before
it can go on as well, and nobody who waits ever loses blocks.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.offload.base import Finished, Plan
from kvferry.offload.base import Step as PlannerStep
from kvferry.offload.scheduler.planner import Planner
from kvferry.testing.clock import Chance
from kvferry.testing.copier import POLLS_MAX
from kvferry.testing.world.blocks import BlockPool, Tables
from kvferry.testing.world.checks import Failed, SimClock
from kvferry.testing.world.requests import VOCABULARY, Load, SimRequest, Status
from kvferry.testing.world.shape import BLOCK_TOKENS, Setup
from kvferry.testing.world.sibling import Sibling

HANG_S = 0.005
"""An engine that asks again only after a longer time was hanging itself."""


@dataclass
class Item:
    """One request in one step: tokens [computed, computed + count) get KV, the last ones of
    them guesses. `sibling`: a load of the sibling's inside this step."""

    request: SimRequest
    computed: int
    count: int
    drafts: list[int]
    is_sampling: bool
    weights: bytes
    tables: list[list[int]]
    admission: int
    sibling: Load | None = None

    @property
    def end(self) -> int:
        """Tokens with KV after the step, without guesses."""
        return self.computed + self.count - len(self.drafts)

    @property
    def accepted_count(self) -> int:
        """How many guesses are right."""
        for index, draft in enumerate(self.drafts):
            if draft != self.request.true_token(self.end + index):
                return index
        return len(self.drafts)


@dataclass
class Step:
    """What one step does, on all ranks."""

    items: list[Item] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    new_blocks: set[int] = field(default_factory=set)
    rewritten: set[int] = field(default_factory=set)
    sibling_loads: list[tuple[SimRequest, Load]] = field(default_factory=list)
    plan: Plan = field(default_factory=Plan)


class Scheduler:
    """`weights`: what the engine computes with now. `check`: called with a request and a range of
    its tokens, whose blocks were loaded or are let go. One thread; nothing here may wait."""

    def __init__(
        self,
        setup: Setup,
        clock: SimClock,
        planner: Planner,
        pool: BlockPool,
        sibling: Sibling,
        chance: Chance,
        counts: Counter,
        check: Callable[[SimRequest, int, int], None],
        weights: bytes,
    ):
        self._setup = setup
        self._clock = clock
        self._planner = planner
        self._pool = pool
        self._tables = Tables(setup.model.groups, pool, setup.has_prefix_cache)
        self._sibling = sibling
        self._chance = chance
        self._counts = counts
        self._check = check
        self._poison_count = 0
        self._must_step = False
        self.weights = weights
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.requests: dict[str, SimRequest] = {}

    @property
    def has_work(self) -> bool:
        """Also for one empty step after the last request, as vLLM takes it."""
        return bool(self.requests) or self._must_step

    @property
    def is_loading(self) -> bool:
        return any(request.load is not None for request in self.requests.values())

    @property
    def living(self) -> list[SimRequest]:
        """Requests whose client is still there."""
        return [r for r in self.requests.values() if r.load is None or not r.load.is_aborted]

    def add(self, request: SimRequest) -> None:
        request.tables = [[] for _ in self._setup.model.groups]
        request.asked_s = self._clock.now_s()
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._planner.on_new_request(request)

    def abort(self, request: SimRequest) -> None:
        """The client is gone. The blocks of a load stay until the load was reported."""
        load = request.load
        self._counts["abort_loading" if load else "abort"] += 1
        self._planner.finished(request.request_id, request.tables)
        if load is not None and not load.is_done:
            load.is_aborted = True
            self.waiting.remove(request)
            return
        self._end(request)

    def reset(self, weights: bytes, mode: str) -> None:
        """Other weights from here on. `mode`: running requests start over ("restart"), go on with
        mixed KV ("mix"), or the prefix cache could not even be cleared ("stale")."""
        self.weights = weights
        for request in list(self.running):
            if mode == "restart":
                self._preempt(request)
            else:
                self._poison(request)
        for request in self.requests.values():
            request.waited_s = 0.0
        if mode != "stale":
            self._pool.forget_all()
        self._planner.reset()

    def schedule(self) -> Step:
        """Decides one step and asks the planner for its plan."""
        step = Step()
        budget = self._setup.step_tokens
        for request in list(self.running):
            if request in self.running and budget > 0:
                budget -= self._continue(step, request, budget)
        if not step.preempted:
            self._admit_waiting(step, budget)
        step.new_blocks, self._pool.new_blocks = self._pool.new_blocks, set()
        step.rewritten = self._rewritten(step.new_blocks)
        step.plan = self._planner.build(self._planner_step(step))
        self._must_step = False
        return step

    def _planner_step(self, step: Step) -> PlannerStep:
        return PlannerStep(
            request_ids=[item.request.request_id for item in step.items],
            computed_tokens=[item.computed for item in step.items],
            scheduled_tokens={item.request.request_id: item.count for item in step.items},
            token_count=sum(item.count for item in step.items),
            preempted=frozenset(step.preempted),
            new_blocks=frozenset(step.new_blocks),
            tables=lambda request_id: self.requests[request_id].tables,
            rewritten=frozenset(step.rewritten),
        )

    def _rewritten(self, new_blocks: set[int]) -> set[int]:
        """New blocks that the engine zeroes before anybody sees the plan."""
        if self._chance.random() > 0.15:
            return set()
        return {block for block in sorted(new_blocks) if self._chance.random() < 0.5}

    # Running requests

    def _continue(self, step: Step, request: SimRequest, budget: int) -> int:
        """Tokens scheduled for a running request: 0 if it must wait or was preempted."""
        known_end = len(request.tokens) + request.unknown_count
        left = known_end - request.computed
        if left == 0 or known_end >= request.end_count:
            return 0
        drafts = self._drafts(request) if left == 1 else []
        count = min(left + len(drafts), budget)
        drafts = drafts[: max(0, count - left)]
        while not self._tables.extend(request, request.computed + count):
            self._preempt(victim := self.running[-1])
            step.preempted.add(victim.request_id)
            if victim is request:
                return 0
        self._take(step, request, count, drafts)
        return count

    def _drafts(self, request: SimRequest) -> list[int]:
        """Guesses of the next answers, some of them right."""
        room = request.end_count - len(request.tokens) - 1
        first = len(request.tokens)
        return [
            request.true_token(first + i)
            if self._chance.random() < 0.6
            else self._chance.randrange(VOCABULARY)
            for i in range(min(self._setup.draft_count, room))
        ]

    def _take(self, step: Step, request: SimRequest, count: int, drafts: list[int]) -> Item:
        first = request.computed
        known_end = len(request.tokens) + request.unknown_count
        item = Item(
            request=request,
            computed=first,
            count=count,
            drafts=drafts,
            is_sampling=first + count - len(drafts) == known_end,
            weights=self._weights_of(request),
            tables=[list(table) for table in request.tables],
            admission=request.admission,
        )
        step.items.append(item)
        request.computed += count
        if item.is_sampling and self._setup.is_async:
            request.unknown_count += 1
        self._label(request, first, request.computed, item.weights)
        self._tables.publish(request, min(request.computed, len(request.tokens)))
        return item

    def _weights_of(self, request: SimRequest) -> bytes:
        """What the KV of this step is made with: mixed if what it builds on is."""
        if not request.weights:
            request.weights = self.weights
            found = {
                self._pool.labels[block]
                for table in request.tables
                for block in table[: -(-request.computed // BLOCK_TOKENS)]
                if block
            }
            if found - {self.weights}:
                self._poison(request)
        return request.weights

    def _poison(self, request: SimRequest) -> None:
        self._poison_count += 1
        self._counts["mixed"] += 1
        request.weights = f"mixed {self._poison_count}".encode()

    def _label(self, request: SimRequest, start: int, end: int, weights: bytes) -> None:
        first, last = start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
        for table in request.tables:
            self._pool.labels.update(dict.fromkeys(table[first:last], weights))

    def _preempt(self, request: SimRequest) -> None:
        self._counts["preemption"] += 1
        self._check(request, 0, request.written)
        self.running.remove(request)
        self._give_up_blocks(request)
        self.waiting.appendleft(request)

    def _give_up_blocks(self, request: SimRequest) -> None:
        self._tables.free(request)
        request.computed = request.unknown_count = request.written = 0
        request.weights = b""
        request.admission += 1
        request.status = Status.WAITING

    # Waiting requests

    def _admit_waiting(self, step: Step, budget: int) -> None:
        """Up to the first one that has no room. vLLM before 0.32 does not come to those behind it,
        be their loads done or not; later ones take requests that hold blocks first."""
        if self._setup.takes_loaded_first:
            self.waiting = deque(sorted(self.waiting, key=lambda request: not request.computed))
        passed: list[SimRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self._setup.running_max:
            request = self.waiting.popleft()
            if not self._is_ready(request):
                passed.append(request)
                continue
            taken = self._resume(step, request, budget)
            taken = self._admit(step, request, budget) if taken is None else taken
            if taken is None:
                passed.append(request)
                continue
            if taken < 0 or request.status is Status.LOADING:
                passed.append(request)
            if taken < 0:
                break
            budget -= taken
        self.waiting.extendleft(reversed(passed))

    def _is_ready(self, request: SimRequest) -> bool:
        """False while it waits for a load. A load that is done is settled here."""
        load = request.load
        if load is None:
            return True
        if not load.is_done:
            return False
        request.load, request.status = None, Status.WAITING
        request.computed = self._loaded_end(request, load)
        if request.computed == 0:
            self._counts["load_in_vain"] += 1
            self._give_up_blocks(request)
            return True
        self._label(request, load.start, request.computed, load.weights)
        self._check(request, load.start, request.computed)
        self._tables.publish(request, request.computed)
        request.computed = min(request.computed, len(request.tokens) - 1)
        return True

    def _loaded_end(self, request: SimRequest, load: Load) -> int:
        """How many tokens can be relied on. With one cache group vLLM keeps what lies before the
        first failed block, with more it starts over."""
        if not load.has_failed:
            return load.end
        if len(request.tables) > 1:
            return 0
        table = request.tables[0]
        failed = [index for index, block in enumerate(table) if block in load.failed_blocks]
        assert failed, "a failed load names no block"
        self._counts["load_in_part"] += failed[0] > 0
        return min(failed[0] * BLOCK_TOKENS, load.end)

    def _resume(self, step: Step, request: SimRequest, budget: int) -> int | None:
        """Goes on after a load. None: there was none; -1: no blocks are free."""
        if request.computed == 0:
            return None
        count = min(len(request.tokens) - request.computed, budget)
        has_room = self._tables.has_room(request)
        if not (has_room and self._tables.extend(request, request.computed + count)):
            return -1
        self._planner.allocated(request.request_id, request.tables, 0)
        self._run(step, request, count)
        return count

    def _admit(self, step: Step, request: SimRequest, budget: int) -> int | None:
        """Tokens scheduled now. None: it waits for an answer; -1: no blocks are free."""
        hits = self._tables.hits(request)
        local = len(hits[0]) * BLOCK_TOKENS
        ours = self._planner.match(request.request_id, local, len(request.tokens))
        self._check_patience(request, ours)
        if ours is None:
            return None
        siblings = self._sibling.match(request, local)
        if siblings is None:
            self._counts["sibling_unsure"] += 1
            return None
        if siblings and (self._setup.is_sibling_first or not ours):
            return self._admit_beside(step, request, hits, local, siblings, budget)
        request.computed = local + ours
        count = 0 if ours else min(len(request.tokens) - local, budget)
        kept_count = self._kept_count() if ours else 0
        if not self._tables.admit(request, hits, local + ours + count, kept_count):
            request.computed = 0
            return -1
        self._planner.allocated(request.request_id, request.tables, ours)
        self._counts["local_hit_tokens"] += local
        if ours:
            ranks = range(self._setup.rank_count)
            self._park(request, Load(local, local + ours, ranks, self.weights))
            self._counts["load_tokens"] += ours
            return 0
        self._run(step, request, count)
        return count

    def _check_patience(self, request: SimRequest, answer: int | None) -> None:
        """A request waits for an answer until a deadline, not longer: one while the ranks have
        not agreed, one for its lookup, one if that was stale after a hang."""
        now_s = self._clock.now_s()
        if answer is not None:
            request.waited_s = 0.0
        else:
            self._counts["asked_again"] += 1
            request.waited_s += min(HANG_S, now_s - request.asked_s)
        request.asked_s = now_s
        if request.waited_s > 3 * self._setup.config.lookup_deadline_s:
            raise Failed("d", f"{request.request_id} waits for a lookup past its deadline")

    def _admit_beside(
        self,
        step: Step,
        request: SimRequest,
        hits: list[list[int]],
        local: int,
        tokens: int,
        budget: int,
    ) -> int:
        """The sibling has won: it loads `tokens` after the local ones."""
        request.computed = local + tokens
        is_prompt = self._sibling.is_prompt()
        count = min(len(request.tokens) - request.computed, budget) if is_prompt else 0
        kept_count = 0 if is_prompt else self._kept_count()
        if not self._tables.admit(request, hits, request.computed + count, kept_count):
            request.computed = 0
            return -1
        self._planner.allocated(request.request_id, request.tables, 0)
        load = self._sibling.load(request, local, local + tokens)
        self._counts["sibling_load"] += 1
        self._label(request, load.start, load.end, load.weights)
        if not is_prompt:
            step.sibling_loads.append((request, load))
            self._park(request, load)
            return 0
        self._run(step, request, count)
        step.items[-1].sibling = load
        return count

    def _kept_count(self) -> int:
        """Blocks that those who are admitted already will need for the tokens that they have."""
        admitted = [r for r in self.requests.values() if any(r.tables)]
        return sum(
            self._tables.lacking_count(request)
            for request in admitted
            if not (request.load and request.load.is_aborted)
        )

    def _park(self, request: SimRequest, load: Load) -> None:
        request.load, request.status = load, Status.LOADING

    def _run(self, step: Step, request: SimRequest, count: int) -> None:
        request.status = Status.RUNNING
        self.running.append(request)
        self._take(step, request, count, [])

    # After the step

    def update(self, step: Step) -> None:
        """The step's answers are known. Those of requests that have lost their blocks meanwhile
        are thrown away, and computed again."""
        for item in step.items:
            request = item.request
            if request.status is Status.FINISHED or request.admission != item.admission:
                continue
            accepted_count = item.accepted_count if item.is_sampling else 0
            request.computed -= len(item.drafts) - accepted_count
            request.unknown_count -= item.is_sampling and self._setup.is_async
            if item.is_sampling:
                self._answer(request, item.end, accepted_count)

    def _answer(self, request: SimRequest, position: int, accepted_count: int) -> None:
        assert position == len(request.tokens), "an answer is missing or came twice"
        for _ in range(accepted_count + 1):
            if not request.is_complete:
                request.tokens.append(request.true_token(len(request.tokens)))
        if request.is_complete:
            self._counts["answered"] += 1
            self._planner.finished(request.request_id, request.tables)
            self._end(request)

    def begin_load(self, request_id: str) -> None:
        """All ranks have been told."""
        request = self.requests.get(request_id)
        if request is not None and request.load is not None:
            request.load.begun_s = self._clock.now_s()

    def check_loads(self, collected_s: float) -> None:
        """At `collected_s` all ranks have said which loads have ended: those past their deadline
        must be among them, but for a scatter that is under way."""
        for request in self.requests.values():
            load = request.load
            is_waiting = load is not None and load.ours
            if is_waiting and collected_s > load.begun_s + self._setup.config.load_deadline_s:
                load.late_count += 1
            if load is not None and load.late_count > POLLS_MAX:
                raise Failed("d", f"{request.request_id} waits for a load past its deadline")

    def loads_ended(self, rank: int, finished: Finished) -> None:
        """What one rank reports, after the planner has heard its report."""
        for request_id in finished.done:
            load = self.requests[request_id].load
            assert load is not None and rank in load.ours, f"{request_id} is reported twice"
            load.ours.remove(rank)
            load.has_failed |= request_id in finished.failed
        for request in list(self.requests.values()):
            load = request.load
            if load is not None and not load.is_sibling:
                load.failed_blocks |= finished.failed_blocks
                self.settle(request, load, not load.ours)

    def settle(self, request: SimRequest, load: Load, is_done: bool) -> None:
        """A load has ended on all ranks: its request may go on, or its blocks may go."""
        load.is_done = is_done
        if is_done and load.is_aborted:
            self._end(request)

    def _end(self, request: SimRequest) -> None:
        self._check(request, 0, min(request.written, len(request.tokens) - 1))
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self._tables.free(request)
        request.status = Status.FINISHED
        request.load = None
        del self.requests[request.request_id]
        self._must_step = True
