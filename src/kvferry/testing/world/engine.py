"""One engine: a scheduler with its planner, and ranks. `advance` does the next small thing."""

from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from kvferry.catalog.runner import Runner
from kvferry.metrics import Metrics
from kvferry.offload.base import Finished, Report
from kvferry.offload.scheduler.planner import Planner
from kvferry.offload.space.growth import Growth
from kvferry.testing.clock import Chance
from kvferry.testing.runner import PromptRunner
from kvferry.testing.world.blocks import BlockPool
from kvferry.testing.world.checks import Failed, SimClock
from kvferry.testing.world.meaning import FIRST_WEIGHTS
from kvferry.testing.world.rank import Rank
from kvferry.testing.world.requests import SimRequest
from kvferry.testing.world.scheduler import Scheduler, Step
from kvferry.testing.world.shape import Setup
from kvferry.testing.world.sibling import Sibling
from kvferry.testing.world.storage import Storage
from kvferry.testing.world.told import Told

TEND_S = 0.1


class Engine:
    """`name`: to tell engines apart in the record of events."""

    def __init__(
        self,
        name: str,
        setup: Setup,
        storage: Storage,
        clock: SimClock,
        chance: Chance,
        counts: Counter,
    ):
        self.name = name
        self.setup = setup
        self.metrics = Metrics()
        self._storage = storage
        self._clock = clock
        self._chance = chance
        self._reset_count = 0
        self.pool = BlockPool(setup.block_count)
        self.ranks = [
            Rank(index, setup, storage, clock, chance) for index in range(setup.rank_count)
        ]
        self.runner = Runner(clock, self.metrics, backoff_s=0.02, backoff_max_s=0.1)
        make_files = chance.choice([PromptRunner, PromptRunner, PromptRunner, Runner])
        self.files = make_files(clock, backoff_s=0.02, backoff_max_s=0.1)
        self.told = Told(name, storage)
        self.planner = self._open_planner()
        self.sibling = Sibling(chance, setup.sibling_chance)
        self.scheduler = Scheduler(
            setup,
            clock,
            self.planner,
            self.pool,
            self.sibling,
            chance,
            counts,
            self._check,
            FIRST_WEIGHTS,
        )
        self._in_flight: deque[Step] = deque()
        self._life = self._live()

    def _open_planner(self) -> Planner:
        self._pages = pages = self._storage.open_pages(late_s_max=0.0)
        catalog = self._storage.open_catalog()
        growth = Growth(catalog, pages, self.files, self._clock, self.metrics, 0.0, full_s=0.1)
        planner = Planner(
            self.setup.config,
            self._clock,
            self.metrics,
            catalog,
            pages,
            self._storage.facts,
            self.runner,
            growth,
            self._storage.meanings.hasher,
            self.setup.rank_count,
            describe=self.told.describe,
            closers=(lambda: self.runner.close(1.0), lambda: self.files.close(1.0), pages.close),
        )
        self.runner.periodic(planner.tend, TEND_S)
        return planner

    @property
    def is_idle(self) -> bool:
        return (
            not (self.scheduler.has_work or self._in_flight or self.sibling.pending)
            and self.planner.is_idle()
            and all(rank.is_idle for rank in self.ranks)
        )

    def advance(self) -> None:
        """The next small thing that its scheduler or a rank does."""
        next(self._life)

    def _live(self) -> Iterator[None]:
        latency = 1 if self.setup.is_async else 0
        while True:
            if self.scheduler.has_work:
                with self._clock.scheduling():
                    step = self.scheduler.schedule()
                self._name_parts(step)
                self._in_flight.append(step)
                yield
            if self._in_flight and (len(self._in_flight) > latency or not self.scheduler.has_work):
                yield from self._execute(self._in_flight.popleft())
            else:
                yield

    def _name_parts(self, step: Step) -> None:
        """Tells what the names mean that the planner has given its parts."""
        parts = self._storage.meanings.parts
        for part, (_, _, namespace) in zip(parts, step.plan.parts, strict=False):
            self._storage.meanings.name(namespace, part, self.scheduler.weights)

    def _execute(self, step: Step) -> Iterator[None]:
        plan = msgspec.msgpack.encode(step.plan)
        for rank in self._any_order():
            rank.before_step(plan, step.new_blocks, step.rewritten)
            yield
        self.sibling.pending += step.sibling_loads
        for planned in step.plan.loads:
            self.scheduler.begin_load(planned.request_id)
        for rank in self._any_order():
            for item in step.items:
                rank.forward(item)
        for item in step.items:
            if item.admission == item.request.admission:
                item.request.written = item.end
        yield
        for rank in self._any_order():
            rank.after_forward()
            yield
        results, collected_s = [], self._clock.now_s()
        for rank in self._any_order():
            results.append((rank.index, *rank.results()))
            yield
        with self._clock.scheduling():
            self._update(step, results)
            self.scheduler.check_loads(collected_s)
        yield

    def _any_order(self) -> list[Rank]:
        return self.ranks if self._chance.random() < 0.5 else self.ranks[::-1]

    def _update(self, step: Step, results: list[tuple[int, Finished, Report | None]]) -> None:
        self.scheduler.update(step)
        reports = [report for _, _, report in results if report is not None]
        if reports:
            merged = reports[0]
            for report in reports[1:]:
                merged = merged.merge(report)
            self.planner.receive(merged)
        self.told.hear(self.planner.take_events())
        for rank_index, finished, _ in results:
            self.scheduler.loads_ended(rank_index, finished)

    def end_sibling_load(self) -> bool:
        """A load of the sibling's ends, and its bytes are there. False if there is none."""
        if not self.sibling.pending:
            return False
        position = self._chance.randrange(len(self.sibling.pending))
        request, load = self.sibling.pending.pop(position)
        for rank in self.ranks:
            rank.write(request, request.tables, load.start, load.end, load.weights)
        self.scheduler.settle(request, load, True)
        return True

    # From outside

    def add(self, request: SimRequest) -> None:
        with self._clock.scheduling():
            self.scheduler.add(request)

    def abort(self, request: SimRequest) -> None:
        with self._clock.scheduling():
            self.scheduler.abort(request)

    def reset(self, mode: str) -> None:
        """The weights are updated: to those that the configuration names, the first time."""
        named = self.setup.config.weights_id if self._reset_count == 0 else None
        self._reset_count += 1
        weights = named or f"{self.name} {self._reset_count}"
        with self._clock.scheduling():
            self.scheduler.reset(weights.encode(), mode)

    def calm(self) -> None:
        for rank in self.ranks:
            rank.calm()

    def die(self) -> None:
        """The process is killed."""
        for pages in (self._pages, *(rank.pages for rank in self.ranks)):
            self._storage.process_ended(pages)

    def close(self) -> None:
        """An orderly shutdown of an engine at rest."""
        for rank in self.ranks:
            rank.jobs.close()
        self.planner.close()

    def check_rest(self) -> None:
        """Nothing is left, and what was told is so."""
        self.planner.tend()
        self.told.hear(self.planner.take_events())
        self.told.check()
        if self.pool.used_blocks:
            raise Failed("c", f"{self.name}: blocks {self.pool.used_blocks} were not freed")
        for rank in self.ranks:
            if not rank.lost_count and not rank.jobs.is_idle():
                raise Failed("c", f"{self.name}: rank {rank.index} is not idle")

    def _check(self, request: SimRequest, start: int, end: int) -> None:
        for rank in self.ranks:
            rank.check(request, start, end, self.pool.labels)
