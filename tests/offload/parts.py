"""Parts, requests and an engine-less planner: what the unit tests of the offload layer share."""

from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.runner import Runner
from kvferry.config import Config
from kvferry.keys import chunk_key
from kvferry.metrics import Metrics
from kvferry.offload.base import Identity, Part, Plan, Report, Step
from kvferry.offload.scheduler.planner import Planner
from kvferry.offload.space.growth import Growth
from kvferry.pages.facts import Asked
from kvferry.pages.memory import Medium, MemoryPages
from kvferry.testing.clock import ManualClock
from kvferry.testing.runner import PromptRunner

CONFIG = Config(pages="memory:", reserve_ahead_count=4)


def make_part(
    chunk_tokens: int = 8, window_tokens: int | None = None, group_index: int = 0
) -> Part:
    return Part(
        stage=0,
        group_index=group_index,
        namespace=bytes([group_index]) * 32,
        group=group_index,
        block_tokens=4,
        chunk_tokens=chunk_tokens,
        slice_count=2,
        payload_bytes=64,
        description="{}",
        window_tokens=window_tokens,
    )


def hasher(namespace, parent, tokens, chunk_tokens, extras):
    """Plain keys of plain chunks, as `_native.chain_keys`."""
    numbers = memoryview(tokens).cast("I").tolist()
    keys = []
    for index, extra in enumerate(extras):
        chunk = numbers[index * chunk_tokens : (index + 1) * chunk_tokens]
        parent = chunk_key(namespace, parent, chunk, extra)
        keys.append(parent)
    return b"".join(keys)


class PlainRequest:
    """A request without extras."""

    is_cacheable = True
    is_readable = True

    def __init__(self, request_id: str, tokens: list[int]):
        self.request_id = request_id
        self.tokens = tokens
        self.can_be_named = True

    def name(self) -> bool:
        self.is_cacheable = self.is_cacheable and self.can_be_named
        return self.is_cacheable

    def extras(self, start_token: int, end_token: int) -> bytes:
        return b""


class Bench:
    """A planner over memory backends, whose runner is stepped by hand."""

    def __init__(self, config: Config = CONFIG, parts: tuple[Part, ...] = (make_part(),)):
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.parts = parts
        pages = MemoryPages(Medium(), self.clock, Asked(64 << 16, 4096, 1 << 16))
        self.facts = pages.open()
        self.catalog = MemoryCatalog(self.clock)
        self.catalog.open(self.facts.store_id, self.facts.capacity_bytes, self.facts.segment_bytes)
        self.runner = Runner(self.clock, self.metrics)
        self.planner = Planner(
            config,
            self.clock,
            self.metrics,
            self.catalog,
            pages,
            self.facts,
            self.runner,
            Growth(self.catalog, pages, PromptRunner(self.clock), self.clock, self.metrics, 0.0),
            hasher,
            1,
        )
        self.tables: dict[str, list[list[int]]] = {}

    def agree(self) -> None:
        identity = Identity(0, 1, 0, self.facts.store_id, self.parts)
        self.planner.receive(Report((identity,)))

    def background(self) -> None:
        """Lets the runner do all that it has."""
        while self.runner.step():
            pass

    def begin(self, name: str, tokens: list[int]) -> PlainRequest:
        """A request with its lookup answered and slots reserved, holding fresh blocks."""
        request = PlainRequest(name, tokens)
        self.planner.on_new_request(request)
        self.background()
        self.step()
        first = 1 + sum(len(table) for tables in self.tables.values() for table in tables)
        count = -(-len(tokens) // 4)
        self.tables[name] = [list(range(first, first + count)) for _ in self.parts]
        return request

    def step(
        self,
        scheduled: dict[str, tuple[int, int]] | None = None,
        new_blocks: frozenset[int] = frozenset(),
        preempted: frozenset[str] = frozenset(),
    ) -> Plan:
        """`scheduled`: computed tokens and scheduled tokens by request."""
        scheduled = scheduled or {}
        return self.planner.build(
            Step(
                request_ids=list(scheduled),
                computed_tokens=[computed for computed, _ in scheduled.values()],
                scheduled_tokens={name: count for name, (_, count) in scheduled.items()},
                token_count=sum(count for _, count in scheduled.values()),
                preempted=preempted,
                new_blocks=new_blocks,
                tables=self.tables.__getitem__,
            )
        )

    def admit(self, name: str, computed: int, count: int) -> Plan:
        """The step that computes a request's first tokens, in blocks that are all new."""
        blocks = frozenset(block for table in self.tables[name] for block in table)
        return self.step({name: (computed, count)}, blocks)
