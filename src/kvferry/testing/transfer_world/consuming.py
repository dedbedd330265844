"""One consumer: requests from waiting to done, with vLLM's rules for loads that others make."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from kvferry.catalog.runner import Runner
from kvferry.device.base import SKIP
from kvferry.metrics import Metrics
from kvferry.testing.clock import Chance
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.kv_memory import EngineShape, GroupModel, engine_memory, rank_layouts
from kvferry.testing.tally import Tally
from kvferry.testing.transfer_world.producing import Pools, Prompt
from kvferry.testing.transfer_world.weather import EngineClock, Weather, WorldDialer, WorldLink
from kvferry.testing.world.checks import Failed
from kvferry.transfer.consumer import Consumer
from kvferry.transfer.consumer_rank import ConsumerRank
from kvferry.transfer.halves import ConsumerPlan, Report
from kvferry.transfer.memory import Fabric
from kvferry.transfer.mover import Mover
from kvferry.transfer.producer import Prefix
from kvferry.transfer.session import Peers
from kvferry.transfer.settings import Settings
from kvferry.transfer.unload import Unloaders


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(eq=False)
class Request:
    """`may_load`: whether its parameters are honest and about this very prompt."""

    request_id: str
    prompt: Prompt
    params: Any
    may_load: bool
    phase: Phase = Phase.WAITING
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    external: int = 0
    steps_left: int = 3
    is_gone: bool = False
    ranks_done: set[int] = field(default_factory=set)
    is_failed: bool = False


class ConsumerEngine:
    """See the module."""

    def __init__(
        self,
        name: str,
        models: Sequence[GroupModel],
        shape: EngineShape,
        settings: Settings,
        clock: EngineClock,
        chance: Chance,
        fabric: Fabric,
        weather: Weather,
        dialer_of,
        namespace: bytes,
        counts: Counter,
    ):
        self.name = name
        self.tally = Tally()
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._weather = weather
        self._counts = counts
        self._shape = shape
        self.requests: list[Request] = []
        self.memory = engine_memory(models, shape)
        self._pools = Pools(shape, len(models), chance)
        self.runner = Runner(clock, Metrics())
        layouts = rank_layouts(self.memory)
        self.consumer = Consumer(
            settings, clock, self.tally, self.runner, namespace, len(self.memory)
        )
        self.links, self.ranks, self.movers = [], [], []
        for number, layout in enumerate(layouts):
            link = WorldLink(fabric, clock)
            link.open()
            unloaders = Unloaders(
                lambda regions, geometry: ReferenceCopier(regions, geometry, chance), 1 << 16
            )
            dialer: WorldDialer = dialer_of()
            peers = Peers(settings, clock, self.tally, link, dialer, layout, layouts, unloaders)
            rank = ConsumerRank(settings, clock, self.tally, link, peers, unloaders, number)
            rank.open()
            self.links.append(link)
            self.ranks.append(rank)
            self.movers.append(Mover(settings, clock, self.tally, link, rank))

    @property
    def stands_still(self) -> bool:
        return any(self._weather.stands_still(link.name) for link in self.links)

    def pause(self, until_s: float) -> None:
        self._weather.paused.update({link.name: until_s for link in self.links})

    def add(self, request: Request) -> None:
        self.requests.append(request)
        with self._clock.scheduling():
            self.consumer.on_new_request(
                request.request_id,
                request.params,
                Prefix(request.prompt.tokens, request.prompt.extras),
            )

    def abort(self, request: Request) -> None:
        self._counts[f"abort {request.phase.value}"] += 1
        self._leave(request)

    def advance(self) -> None:
        """One step of the engine."""
        with self._clock.scheduling():
            for request in list(self.requests):
                if request.phase is Phase.WAITING and not request.is_gone:
                    self._admit(request)
            plan = msgspec.msgpack.encode(self.consumer.plan())
        for rank in self.ranks:
            with self._clock.scheduling():
                rank.begin(msgspec.msgpack.decode(plan, type=ConsumerPlan))
        merged = Report()
        for number, rank in enumerate(self.ranks):
            with self._clock.scheduling():
                finished, report = rank.collect(), rank.report()
            merged = merged.merge(report)
            for request_id in finished.done:
                self._rank_done(number, request_id, request_id in finished.failed)
        with self._clock.scheduling():
            self.consumer.receive(merged)
        for request in list(self.requests):
            self._run(request)

    def _admit(self, request: Request) -> None:
        prompt_count = len(request.prompt.tokens)
        width = max(self._shape.block_tokens)
        if self._chance.random() < 0.02:
            request.computed = self._chance.randrange(0, prompt_count + 1, width)
        count = self.consumer.matched(request.request_id, request.computed)
        if count is None:
            self._counts["asked again"] += 1
            return
        if count and not request.may_load:
            raise Failed("a", f"{request.request_id} may not load, and was offered {count} tokens")
        tables = self._pools.take(prompt_count)
        if tables is None:
            return
        if count and self._chance.random() < 0.05:
            count = 0  # another connector was asked first
        request.tables, request.external = tables, count
        if count:
            self._fill(request, 0, request.computed)
        else:
            self._fill(request, 0, prompt_count)
        wanted = [
            [
                SKIP if index * tokens < request.computed else block
                for index, block in enumerate(table)
            ]
            for table, tokens in zip(tables, self._shape.block_tokens, strict=True)
        ]
        loads = self.consumer.allocated(
            request.request_id,
            tuple(tuple(table) for table in wanted),
            request.computed,
            count,
        )
        if loads != (count > 0):
            raise Failed("d", f"{request.request_id}: {count} tokens were offered, loads: {loads}")
        request.phase = Phase.LOADING if loads else Phase.RUNNING
        self._counts["loads" if loads else "local"] += 1

    def _fill(self, request: Request, start: int, end: int) -> None:
        """The engine itself computes tokens [start, end); what it does not is garbage."""
        for groups in self.memory:
            for group, table in zip(groups, request.tables, strict=False):
                for index, block in enumerate(table):
                    if start <= index * group.block_tokens < end:
                        group.write(block, index, request.prompt.text)
                    elif start == 0:
                        group.spoil(block)

    def _rank_done(self, rank: int, request_id: str, is_failed: bool) -> None:
        request = next((r for r in self.requests if r.request_id == request_id), None)
        if request is None or request.phase is not Phase.LOADING or rank in request.ranks_done:
            raise Failed("c", f"{request_id} is reported by rank {rank}, but does not load")
        request.ranks_done.add(rank)
        request.is_failed = request.is_failed or is_failed
        if len(request.ranks_done) < len(self.ranks):
            return
        with self._clock.scheduling():
            self.consumer.loaded([request_id], [request_id] if request.is_failed else [])
        if request.is_gone:
            self._free(request)
            return
        self._counts["load failed" if request.is_failed else "load done"] += 1
        request.phase = Phase.RUNNING
        if request.is_failed:
            self._fill(request, 0, len(request.prompt.tokens))
        else:
            self._check(request, request.computed + request.external)
            self._fill(request, request.computed + request.external, len(request.prompt.tokens))

    def _check(self, request: Request, token_count: int) -> None:
        for rank, groups in enumerate(self.memory):
            for group, table in zip(groups, request.tables, strict=False):
                for index, block in enumerate(table):
                    if not group.holds(block, index, request.prompt.text, token_count):
                        raise Failed(
                            "a",
                            f"{self.name} {request.request_id} rank {rank} block {index}: these are"
                            " not its bytes",
                        )

    def _run(self, request: Request) -> None:
        if request.phase is not Phase.RUNNING:
            return
        request.steps_left -= 1
        if request.steps_left <= 0:
            self._check(request, request.computed + request.external)
            self._leave(request)

    def _leave(self, request: Request) -> None:
        request.is_gone = True
        with self._clock.scheduling():
            must_wait = self.consumer.finished(request.request_id)
        if must_wait != (request.phase is Phase.LOADING):
            raise Failed("c", f"{request.request_id} in {request.phase}: must wait: {must_wait}")
        if not must_wait:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.requests.remove(request)
        if request.tables:
            self._pools.give_back(request.tables)

    @property
    def is_loading(self) -> bool:
        return any(request.phase is Phase.LOADING for request in self.requests)

    @property
    def is_idle(self) -> bool:
        return not self.requests and all(rank.is_idle for rank in self.ranks)

    def check_rest(self) -> None:
        if not self._pools.is_whole or self.consumer.record_count:
            raise Failed("c", f"{self.name} at rest still keeps blocks or records")
        for rank in self.ranks:
            if rank.taken_count != rank.out_count:
                raise Failed("c", f"{self.name} at rest has staging out")
        self._counts["never returned"] += sum(rank.out_count for rank in self.ranks)

    def close(self) -> None:
        for link, rank in zip(self.links, self.ranks, strict=True):
            if link.close(0.0) != (rank.out_count == 0 or bool(rank.exposed_to)):
                raise Failed("c", f"a link of {self.name} closes in spite of reads that are out")
            rank.close()
