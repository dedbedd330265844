"""One worker: its blocks, and the jobs, mover and runner that a real one has."""

from collections.abc import Iterable

import msgspec

from kvferry.catalog.runner import Runner
from kvferry.device.staging import Staging, memory_from
from kvferry.keys import tenant_id
from kvferry.metrics import Metrics
from kvferry.offload.base import Finished, Identity, LocalPart, Part, Plan, Report
from kvferry.offload.worker.jobs import Jobs
from kvferry.offload.worker.load_jobs import LoadJobs
from kvferry.offload.worker.mover import Mover
from kvferry.offload.worker.ranks import RankPart
from kvferry.offload.worker.store_jobs import StoreJobs
from kvferry.offload.worker.trial import Trial
from kvferry.testing.clock import Chance
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.faults import Fault
from kvferry.testing.world.checks import Failed, SimClock
from kvferry.testing.world.meaning import block_content, next_digest
from kvferry.testing.world.memory import PartMemory
from kvferry.testing.world.requests import SimRequest
from kvferry.testing.world.scheduler import Item
from kvferry.testing.world.shape import BLOCK_TOKENS, CONTENT_BYTES, Setup
from kvferry.testing.world.storage import Storage

READS_MAX = 8
PLANS = msgspec.msgpack.Decoder(Plan)


class SlowCopier(ReferenceCopier):
    """Sometimes does not get a gather done in the time that a fence gives it."""

    chance_of_timeout = 0.0

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        jobs = list(jobs)
        is_gather = any(self._waiting[job][0] for job in jobs if job in self._waiting)
        if is_gather and self._chance.random() < self.chance_of_timeout:
            return False
        return super().finish(jobs, timeout_s)


class Rank:
    """`lost_count`: operations whose result never comes, each with its staging slot."""

    def __init__(self, index: int, setup: Setup, storage: Storage, clock: SimClock, chance: Chance):
        self.index = index
        self.metrics = Metrics()
        self._setup = setup
        self._clock = clock
        self._chance = chance
        self._digest = storage.digest
        self._tenant = tenant_id(setup.config.tenant)
        self._loading: set[str] = set()
        self._must_fail: set[str] = set()
        stage, tp_index = divmod(index, setup.tp)
        self._parts = [
            (number, part)
            for number, part in enumerate(storage.meanings.parts)
            if part.stage == stage
        ]
        groups = setup.model.groups
        self._memories = {
            number: PartMemory(
                groups[part.group_index],
                setup.placement(groups[part.group_index], tp_index),
                setup.block_count,
                chance,
            )
            for number, part in self._parts
        }
        self.catalog = storage.open_catalog()
        self.pages = storage.open_pages(late_s_max=2 * setup.config.load_deadline_s)
        self.runner = Runner(clock, self.metrics, backoff_s=0.02, backoff_max_s=0.1)
        self._rank_parts = [self._rank_part(number, part, tp_index) for number, part in self._parts]
        extent_bytes = max(part.extent_bytes for part in self._rank_parts)
        self.staging = Staging(
            setup.staging_slots * extent_bytes, extent_bytes, memory_from(self.pages.allocate)
        )
        self._open(storage, stage)

    def _rank_part(self, number: int, part: Part, tp_index: int) -> RankPart:
        memory = self._memories[number]
        placement = self._setup.placement(self._setup.model.groups[part.group_index], tp_index)
        is_last = self.index == self._setup.rank_count - 1  # the others let the page store verify
        copier = SlowCopier(
            memory.regions(), part.geometry, self._chance, self._digest if is_last else None
        )
        copier.chance_of_timeout = self._setup.stuck_gather_chance
        local = LocalPart(part, memory.regions(), placement)
        return RankPart(local, copier, self._tenant, part.namespace)

    def _open(self, storage: Storage, stage: int) -> None:
        config, clock, metrics = self._setup.config, self._clock, self.metrics
        self.staging.open()
        self.pages.register(self.staging.address, self.staging.length_bytes)
        loads = LoadJobs(self.pages, self.staging, clock, metrics, READS_MAX)
        stores = StoreJobs(self.pages, self.staging, clock, metrics)
        trial = Trial(self.pages, self.staging, self.runner, clock, self._rank_parts)
        self.mover = Mover(
            config, clock, metrics, self.catalog, self.pages, self.runner, loads, stores, trial
        )
        identity = Identity(
            self.index,
            self._setup.rank_count,
            stage,
            storage.facts.store_id,
            tuple(part for _, part in self._parts),
        )
        closers = (lambda: self.runner.close(1.0), self.pages.close, self.staging.close)
        self.jobs = Jobs(
            config,
            clock,
            metrics,
            identity,
            self._rank_parts,
            self.staging,
            loads,
            stores,
            self.mover,
            closers,
        )

    @property
    def lost_count(self) -> int:
        return self.pages.fired[Fault.LOST]

    @property
    def is_idle(self) -> bool:
        """Nothing is under way but what was lost."""
        return self.mover.pending_count == self.staging.taken_count == self.lost_count

    def calm(self) -> None:
        for part in self._rank_parts:
            part.copier.chance_of_timeout = 0.0

    # A step

    def before_step(self, plan: bytes, new_blocks: Iterable[int], rewritten: Iterable[int]) -> None:
        """The fence; then whatever the step may overwrite is overwritten. What the engine rewrites
        early is by then."""
        decoded = PLANS.decode(plan)
        self._spoil(rewritten)
        self.jobs.before_step(decoded)
        if decoded.drop_stores:
            self._must_fail |= self._loading
        self._loading |= {load.request_id for load in decoded.loads}
        self._spoil(new_blocks)

    def _spoil(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for memory in self._memories.values():
                memory.write(block, self._chance.randbytes(2 * 2 * CONTENT_BYTES))

    def forward(self, item: Item) -> None:
        """Writes the KV of one request's tokens."""
        if item.sibling is not None:
            load = item.sibling
            self.write(item.request, item.tables, load.start, load.end, load.weights)
        self.write(item.request, item.tables, item.computed, item.end, item.weights)
        digest = item.request.digest(item.end)
        for position, draft in enumerate(item.drafts, item.end):
            digest = next_digest(digest, draft)
            self._write_block(item.tables, position // BLOCK_TOKENS, digest, item.weights)

    def write(
        self,
        request: SimRequest,
        tables: list[list[int]],
        start: int,
        end: int,
        weights: bytes,
    ) -> None:
        """The KV of the tokens [start, end) of a request."""
        for index in range(start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            digest = request.digest(min((index + 1) * BLOCK_TOKENS, end))
            self._write_block(tables, index, digest, weights)

    def _write_block(
        self, tables: list[list[int]], index: int, digest: bytes, weights: bytes
    ) -> None:
        for number, part in self._parts:
            block = tables[part.group_index][index]
            if block:
                content = self._content(number, part, digest, weights)
                self._memories[number].write(block, content)

    def _content(self, number: int, part: Part, digest: bytes, weights: bytes) -> bytes:
        length_bytes = self._setup.model.groups[part.group_index].block_bytes
        return block_content(weights, number, digest, length_bytes)

    def after_forward(self) -> None:
        self.jobs.after_forward(is_empty_step=False)

    def results(self) -> tuple[Finished, Report | None]:
        finished = self.jobs.collect()
        if (finished.done & self._must_fail) - finished.failed:
            raise Failed("a", "a load that began before a reset was taken")
        self._loading -= finished.done
        self._must_fail -= finished.done
        return finished, self.jobs.report()

    def check(self, request: SimRequest, start: int, end: int, labels: dict[int, bytes]) -> None:
        """The full blocks of the tokens [start, end) hold what their labels say."""
        for number, part in self._parts:
            table, memory = request.tables[part.group_index], self._memories[number]
            for index in range(start // BLOCK_TOKENS, end // BLOCK_TOKENS):
                block = table[index]
                if not block:
                    continue
                digest = request.digest((index + 1) * BLOCK_TOKENS)
                expected = self._content(number, part, digest, labels[block])
                if memory.read(block) != memory.share(expected):
                    raise Failed(
                        "a",
                        f"{request.request_id}: block {block} at {index} of part {number}, rank "
                        f"{self.index}, does not hold its tokens",
                    )
