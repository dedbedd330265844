"""Stores of one rank: gather, write, commit, chunk by chunk.

Life of a store:

1. QUEUED: planned, waits for staging. The engine's blocks are still needed.
2. GATHERING: a copier reads the blocks. The fence sees to it that it does so before they change,
   or gives the store up.
3. WRITING: the bytes are in staging; the blocks are free; the page store owns the staging slot.
4. COMMITTING: on storage; the runner tells the catalog. The staging slot is back.

It ends once, published, committed in part, or dropped with a reason. One that is dropped while
the page store or the copier still works on its staging keeps the slot until they are done.

The engine's thread adds and fences, the mover's thread does the rest: all state is under `_lock`,
which nobody holds while bytes move.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvferry.catalog.base import Commit, Slot, Verdict
from kvferry.clock import Clock
from kvferry.device.base import Copier, Done, Piece
from kvferry.device.staging import Staging
from kvferry.metrics import Metrics
from kvferry.offload.base import Chunk, Store
from kvferry.offload.worker.ranks import RankPart
from kvferry.pages.base import Extent, Outcome, PageStore, Result

FENCE_TIMEOUT_S = 1.0
"""A gather is a copy in memory: one that takes longer has lost its threads; the store is lost."""

GATHER_BYTES = 32 << 20
"""How much one job of a copier gathers: enough to pay for its start, and written while the next
one is gathered."""


class Stage(Enum):
    QUEUED = 1
    GATHERING = 2
    WRITING = 3
    DROPPED = 4


@dataclass(slots=True, eq=False)
class StoreJob:
    """`checksums`: of its slices, if the copier has computed them."""

    part: RankPart
    chunk: Chunk
    until_s: float  # by then it is on storage, or given up
    started_s: float
    stage: Stage = Stage.QUEUED
    staging_address: int | None = None
    copy: int = 0
    checksums: tuple[int, ...] | None = None


class StoreJobs:
    """See the module. `commits` collects what `take_commits` hands to the runner."""

    def __init__(self, pages: PageStore, staging: Staging, clock: Clock, metrics: Metrics):
        self._pages = pages
        self._staging = staging
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        self._queue: deque[StoreJob] = deque()
        self._by_block: dict[int, list[StoreJob]] = {}
        self._copiers: list[Copier] = []
        self._copies: dict[tuple[Copier, int], list[StoreJob]] = {}
        self._gathered: list[StoreJob] = []
        self._submitting: list[StoreJob] = []
        self._writes: dict[tuple[int, int], StoreJob] = {}
        self._written: list[StoreJob] = []

    def watch(self, copiers: Iterable[Copier]) -> None:
        """These are all copiers of the rank: `poll_copies` takes whatever they return."""
        with self._lock:
            self._copiers = list(copiers)

    # Engine's thread

    def add(self, part: RankPart, store: Store, deadline_s: float) -> None:
        """Queues the chunks of a span that this rank writes: the mover gathers them, or a fence
        that comes first. To submit a gather takes longer than an engine's step has to spare."""
        now_s = self._clock.now_s()
        until_s = now_s + min(deadline_s, store.lease_s)
        with self._lock:
            for chunk in store.span.chunks():
                if part.local.placement.writes(chunk.chunk_index):
                    job = StoreJob(part, chunk, until_s, now_s)
                    self._queue.append(job)
                    for block in chunk.blocks:
                        self._by_block.setdefault(block, []).append(job)

    def lose(self, rewritten: Iterable[int]) -> None:
        """These blocks may hold other bytes already: what is not gathered from them is dropped."""
        with self._lock:
            blocks = self._by_block.keys() & set(rewritten)
            for job in [job for block in blocks for job in self._by_block[block]]:
                self._drop(job, "rewritten")

    def fence(self, overwritten: Iterable[int]) -> None:
        """When this returns, no store needs one of these blocks any more."""
        with self._lock:
            blocks = self._by_block.keys() & set(overwritten)
            jobs = list(dict.fromkeys(job for block in blocks for job in self._by_block[block]))
            if not jobs:
                return
            self._gather([job for job in jobs if self._has_staging(job)])
            for job in jobs:
                if job.stage is Stage.QUEUED:
                    self._drop(job, "fenced")
            gathers = [job for job in jobs if job.stage is Stage.GATHERING]
        started_s = self._clock.now_s()
        for copier in dict.fromkeys(job.part.copier for job in gathers):
            mine = [job for job in gathers if job.part.copier is copier]
            if not copier.finish({job.copy for job in mine}, FENCE_TIMEOUT_S):
                self._give_up(mine)
        self._metrics.observe("kvferry_fence_wait_seconds", self._clock.now_s() - started_s)

    def _give_up(self, jobs: Iterable[StoreJob]) -> None:
        with self._lock:
            for job in jobs:
                if job.stage is Stage.GATHERING:
                    self._drop(job, "fenced")

    def drop_all(self, reason: str) -> None:
        """Nothing that is under way is published, except what is being committed."""
        with self._lock:
            for job in self._all():
                self._drop(job, reason)
            self._written = []

    @property
    def pending_count(self) -> int:
        with self._lock:
            return len(self._all())

    # Mover's thread

    def poll_copies(self) -> list[tuple[Copier, Done]]:
        """Takes what the copiers have done. Returns what is no gather of ours. Any thread."""
        others = []
        with self._lock:
            for copier in self._copiers:
                for copy in copier.poll():
                    jobs = self._copies.pop((copier, copy.job), None)
                    if jobs is None:
                        others.append((copier, copy))
                        continue
                    for job, checksums in zip(jobs, copy.checksums, strict=False):
                        job.checksums = checksums
                    for job in jobs:
                        self._after_gather(job)
        return others

    def advance(self) -> bool:
        """Moves every store on as far as it goes now. True if something happened."""
        with self._lock:
            self._expire()
            self._start_gathers()
            self._submitting, self._gathered = self._gathered, []
            jobs = self._submitting
        if not jobs:
            return False
        number = self._pages.submit_writes([self._extent(job) for job in jobs])
        with self._lock:
            self._writes.update({(number, index): job for index, job in enumerate(jobs)})
            self._submitting = []
        return True

    def written(self, result: Result) -> bool:
        """Takes the result of a write of ours; False if it is another's."""
        with self._lock:
            job = self._writes.pop((result.job, result.index), None)
            if job is None:
                return False
            self._release(job)
            if job.stage is Stage.DROPPED:
                return True
            if result.outcome is Outcome.OK:
                self._written.append(job)
            else:
                self._drop(job, result.outcome.value)
        return True

    def take_commits(self) -> dict[RankPart, list[StoreJob]]:
        """What is on storage and not committed yet, by part."""
        with self._lock:
            written, self._written = self._written, []
        by_part: dict[RankPart, list[StoreJob]] = {}
        for job in written:
            by_part.setdefault(job.part, []).append(job)
        return by_part

    def committed(self, job: StoreJob, verdict: Verdict | None) -> None:
        """What the catalog said of a job; None: nothing."""
        if verdict is None or verdict is Verdict.EXPIRED:
            reason = "unavailable" if verdict is None else "expired"
            self._count_drop(reason)
            return
        part = job.part
        names = {Verdict.PUBLISHED: "published", Verdict.PARTIAL: "written"}
        outcome = names.get(verdict, "duplicate")
        self._metrics.count("kvferry_stores_total", outcome=outcome)
        self._metrics.count("kvferry_store_bytes_total", part.extent_bytes)
        if verdict is Verdict.PUBLISHED:
            self._metrics.count("kvferry_stored_tokens_total", part.local.part.chunk_tokens)
        self._metrics.observe("kvferry_store_seconds", self._clock.now_s() - job.started_s)

    # Under the lock

    def _start_gathers(self) -> None:
        jobs = []
        while self._queue:
            job = self._queue[0]
            if job.stage is Stage.QUEUED:
                if not self._has_staging(job):
                    break
                jobs.append(job)
            self._queue.popleft()
        self._gather(jobs)

    def _has_staging(self, job: StoreJob) -> bool:
        """Whether a queued job got a slot."""
        if job.stage is Stage.QUEUED:
            job.staging_address = self._staging.take_for_store()
        return job.stage is Stage.QUEUED and job.staging_address is not None

    def _gather(self, jobs: Iterable[StoreJob]) -> None:
        """Starts the gathers of queued jobs with staging, several at a time."""
        by_part: dict[RankPart, list[StoreJob]] = {}
        for job in jobs:
            by_part.setdefault(job.part, []).append(job)
        for part, mine in by_part.items():
            batch_count = max(1, GATHER_BYTES // part.extent_bytes)
            for start in range(0, len(mine), batch_count):
                batch = mine[start : start + batch_count]
                copy = part.copier.submit_gather(
                    [Piece(job.chunk.blocks, job.staging_address) for job in batch]
                )
                self._copies[part.copier, copy] = batch
                for job in batch:
                    job.stage, job.copy = Stage.GATHERING, copy

    def _after_gather(self, job: StoreJob) -> None:
        self._forget_blocks(job)
        if job.stage is Stage.DROPPED:
            self._release(job)
        else:
            job.stage = Stage.WRITING
            self._gathered.append(job)

    def _all(self) -> list[StoreJob]:
        gathering = [job for jobs in self._copies.values() for job in jobs]
        gathered = [*self._gathered, *self._submitting]
        under_way = [*gathering, *gathered, *self._writes.values()]
        queued = [job for job in self._queue if job.stage is Stage.QUEUED]
        return queued + under_way + self._written

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        while self._queue and self._queue[0].until_s < now_s:
            job = self._queue.popleft()
            if job.stage is Stage.QUEUED:
                self._drop(job, "no_staging")
        for job in self._writes.values():
            if job.stage is Stage.WRITING and job.until_s < now_s:
                self._drop(job, "late")
        late = [job for job in self._gathered if job.until_s < now_s]
        for job in late:  # the slot may be another's by now
            self._gathered.remove(job)
            self._drop(job, "late")
            self._release(job)

    def _extent(self, job: StoreJob) -> Extent:
        return job.part.extent(job.chunk, job.staging_address, job.checksums)

    def _drop(self, job: StoreJob, reason: str) -> None:
        if job.stage is Stage.DROPPED:
            return
        if job.stage is Stage.QUEUED:
            self._forget_blocks(job)
        job.stage = Stage.DROPPED
        self._count_drop(reason)

    def _count_drop(self, reason: str) -> None:
        self._metrics.count("kvferry_stores_total", outcome="dropped")
        self._metrics.count("kvferry_store_drops_total", reason=reason)

    def _forget_blocks(self, job: StoreJob) -> None:
        for block in job.chunk.blocks:
            jobs = self._by_block.get(block, [])
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self._by_block.pop(block, None)

    def _release(self, job: StoreJob) -> None:
        if job.staging_address is not None:
            self._staging.give_back(job.staging_address)
            job.staging_address = None


def commit_of(job: StoreJob) -> Commit:
    """What the catalog is told of a job that is on storage."""
    chunk, placement = job.chunk, job.part.local.placement
    return Commit(
        chunk.key,
        chunk.parent,
        chunk.chunk_index,
        Slot(chunk.address, chunk.generation),
        placement.first_slice,
        placement.slice_count,
    )
