"""One producer: prefills that finish, blocks that are kept for readers and then used again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.testing.clock import Chance
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.kv_memory import (
    EngineShape,
    GroupMemory,
    GroupModel,
    engine_memory,
    rank_layouts,
)
from kvferry.testing.tally import Tally
from kvferry.testing.transfer_world.weather import EngineClock, Weather, WorldLink
from kvferry.testing.world.checks import Failed
from kvferry.transfer.base import Range
from kvferry.transfer.compatibility import Compatibility
from kvferry.transfer.halves import ProducerPlan
from kvferry.transfer.handshake import Introduction, RankEnd
from kvferry.transfer.memory import Fabric
from kvferry.transfer.mover import Mover
from kvferry.transfer.producer import Identity, Prefix, Producer
from kvferry.transfer.producer_rank import ProducerRank
from kvferry.transfer.settings import Settings


@dataclass(frozen=True)
class Prompt:
    """`text` says what the content of its blocks must be, `tokens` what it is called by."""

    text: str
    tokens: tuple[int, ...]
    extras: bytes = b""


class Pools:
    """Free blocks by group of one engine."""

    def __init__(self, shape: EngineShape, group_count: int, chance: Chance):
        self._free = [list(range(shape.block_count)) for _ in range(group_count)]
        self._shape = shape
        self._chance = chance

    def take(self, token_count: int) -> list[list[int]] | None:
        counts = [-(-token_count // tokens) for tokens in self._shape.block_tokens]
        if any(len(free) < count for free, count in zip(self._free, counts, strict=True)):
            return None
        for free in self._free:
            if self._chance.random() < 0.5:
                self._chance.shuffle(free)
        return [[free.pop() for _ in range(n)] for free, n in zip(self._free, counts, strict=True)]

    def give_back(self, tables: Sequence[Sequence[int]]) -> None:
        for free, table in zip(self._free, tables, strict=True):
            if set(free) & set(table):
                raise Failed("c", f"blocks {table} are freed twice")
            free.extend(table)

    @property
    def is_whole(self) -> bool:
        return all(len(free) == self._shape.block_count for free in self._free)


@dataclass
class Held:
    tables: list[list[int]]
    ranks_left: set[int] = field(default_factory=set)


class ProducerEngine:
    """See the module. `port`: its address."""

    def __init__(
        self,
        port: int,
        models: Sequence[GroupModel],
        shape: EngineShape,
        settings: Settings,
        clock: EngineClock,
        chance: Chance,
        fabric: Fabric,
        weather: Weather,
        compatibility: Compatibility,
        namespace: bytes,
        counts: Counter,
    ):
        self.port = port
        self.boot = clock.random_bytes(16)
        self.compatibility = compatibility
        self.tally = Tally()
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._weather = weather
        self._counts = counts
        self._request_count = 0
        self._held: dict[str, Held] = {}
        self.memory = engine_memory(models, shape)
        self._pools = Pools(shape, len(models), chance)
        identity = Identity(self.boot, namespace)
        self.producer = Producer(settings, clock, self.tally, identity, port)
        self.links, self._ranks, self.movers = [], [], []
        for groups, layout in zip(self.memory, rank_layouts(self.memory), strict=True):
            link = WorldLink(fabric, clock)
            link.open()
            for group in groups if settings.direction == "pull" else ():
                link.register(group.memory)
            rank = ProducerRank(settings, clock, self.tally, link, layout, self._make_copier)
            rank.open()
            self.links.append(link)
            self._ranks.append(rank)
            self.movers.append(Mover(settings, clock, self.tally, link, rank))

    def introduction(self) -> Introduction:
        layouts = rank_layouts(self.memory)
        ends = [
            RankEnd(layout, link.describe(self._reachable(groups)))
            for layout, link, groups in zip(layouts, self.links, self.memory, strict=True)
        ]
        frame = msgspec.msgpack.encode(Introduction(self.boot, tuple(ends)))
        return msgspec.msgpack.decode(frame, type=Introduction)

    def _reachable(self, groups: Sequence[GroupMemory]) -> list[Range]:
        """Push exposes only staging, and only consumers'."""
        return [group.memory for group in groups] if self._settings.direction == "pull" else []

    def _make_copier(self, regions, geometry) -> ReferenceCopier:
        return ReferenceCopier(regions, geometry, self._chance)

    @property
    def stands_still(self) -> bool:
        return any(self._weather.stands_still(link.name) for link in self.links)

    def pause(self, until_s: float) -> None:
        self._weather.paused.update({link.name: until_s for link in self.links})

    def prefill(self, prompt: Prompt):
        """A request comes and is done. What its client gets: parameters, or None."""
        tables = self._pools.take(len(prompt.tokens))
        if tables is None:
            self._counts["producer full"] += 1
            return None
        for groups in self.memory:
            for group, table in zip(groups, tables, strict=False):
                for index, block in enumerate(table):
                    group.write(block, index, prompt.text)
        self._request_count += 1
        request_id = f"prefill {self._request_count}"
        with self._clock.scheduling():
            params = self.producer.finished(
                request_id,
                {"do_remote_decode": True},
                Prefix(prompt.tokens, prompt.extras),
                tuple(tuple(table) for table in tables),
            )
        if params is None:
            self._pools.give_back(tables)
        else:
            self._held[request_id] = Held(tables, set(range(len(self._ranks))))
        return params

    def advance(self) -> None:
        """One step of the engine."""
        with self._clock.scheduling():
            plan = msgspec.msgpack.encode(self.producer.plan())
        for rank in self._ranks:
            with self._clock.scheduling():
                rank.begin(msgspec.msgpack.decode(plan, type=ProducerPlan))
        for number, rank in enumerate(self._ranks):
            with self._clock.scheduling():
                ended = rank.take_ended()
            for request_id in ended:
                self._ended(request_id, number)

    def _ended(self, request_id: str, rank: int) -> None:
        held = self._held.get(request_id)
        if held is None or rank not in held.ranks_left:
            raise Failed("c", f"{request_id} ended twice at rank {rank}")
        held.ranks_left.discard(rank)
        if held.ranks_left:
            return
        del self._held[request_id]
        for groups in self.memory:  # others compute in these blocks now
            for group, table in zip(groups, held.tables, strict=False):
                for index, block in enumerate(table):
                    group.write(block, index, "another user's text")
        self._pools.give_back(held.tables)
        self.producer.ended([request_id])

    @property
    def is_idle(self) -> bool:
        return not self._held and all(rank.is_idle for rank in self._ranks)

    def check_rest(self) -> None:
        if not self._pools.is_whole or self.producer.held_block_count:
            raise Failed("c", "a producer at rest still keeps blocks")

    def close(self) -> None:
        for link, rank in zip(self.links, self._ranks, strict=True):
            if not link.close(0.0):
                raise Failed("c", "a producer's link has reads or writes out")
            rank.close()
