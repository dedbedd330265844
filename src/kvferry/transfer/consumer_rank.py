"""The consumer's worker half: reads what was granted, or has it written, and scatters what is
surely what was meant.

Life of a chunk: it waits for a slot of staging, is read into it, and then

1. is *sure* if the read ended before our own conservative end of the lease; or else
2. is *confirmed* if the source, asked after the read had ended, still holds it in the same
   generation;
3. is unloaded into the engine's blocks. Anything else fails the load.

One that is pushed waits for a slot, is written into it by the source, and goes on at 3, where it is
proven by its checksums.

A load ends exactly once: complete, or failed as soon as nothing of it is being unloaded, at its
deadline at the latest whatever the link does. Reads of a failed load go on in quarantine (`reads`).

The engine's thread begins and collects, the mover's does the rest; what both touch is under
`_lock`, which nobody holds while bytes move or the link works.
"""

import threading
from collections import deque
from collections.abc import Sequence

from kvferry.clock import Clock
from kvferry.device.staging import Allocate, Staging, host_memory
from kvferry.errors import UnavailableError
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link, PostEnded
from kvferry.transfer.claims import Claims, Transfer
from kvferry.transfer.halves import ConsumerPlan, Finished, Report
from kvferry.transfer.invitations import Invitations
from kvferry.transfer.messages import Answer, Body, Grant
from kvferry.transfer.reads import ChunkJob, LoadJob, Reads
from kvferry.transfer.session import Peers
from kvferry.transfer.settings import Settings
from kvferry.transfer.unload import Unloaders

POSTING_S = 0.005
"""For how long one round begins reads."""
NEWS_WAIT_S = 0.005
"""For how long a step that computes nothing leaves the interpreter to the mover, which otherwise
waits as long for it at each call."""


class ConsumerRank:
    """See the module. `open` acquires staging and registers it; the link is open before. `close` is
    idempotent, after the mover has stopped and the link is closed."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        peers: Peers,
        unloaders: Unloaders,
        rank: int,
        allocate: Allocate = host_memory,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self.peers = peers
        self._unloaders = unloaders
        self._staging = Staging(settings.staging_bytes, settings.slot_bytes, allocate)
        moved_by = Reads if settings.direction == "pull" else Invitations
        self._reads = moved_by(settings, clock, metrics, link, peers, self._staging)
        self._claims = Claims(settings, clock, metrics, link, peers, rank)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._unanswered: set[str] = set()  # what is watched, the engine's thread's
        self._step = 0
        self._is_aside = False
        self._plans: deque[ConsumerPlan] = deque()
        self._active: dict[str, LoadJob] = {}
        self._ended: list[LoadJob] = []
        self._over: deque[str] = deque()
        self._waiting: deque[ChunkJob] = deque()
        self._confirming: list[tuple[Transfer, ChunkJob]] = []
        self._landed: deque[ChunkJob] = deque()

    def open(self) -> None:
        self._staging.open()
        self._link.register(self._reads.memory)
        self.peers.open(self._reads.memory)
        is_written = self._settings.direction == "push"
        description = self._link.describe([self._reads.memory] if is_written else ())
        self._reads.open(description)
        self._claims.open(description)

    def close(self) -> None:
        self._unloaders.close()
        self._staging.close()

    # Engine's thread

    def begin(self, plan: ConsumerPlan) -> None:
        """Each step, also without news. What a load names belongs to it until `collect` has
        returned it."""
        now_s = self._clock.now_s()
        self._step += 1
        self._unloaders.order(self._step)
        if plan == ConsumerPlan():
            return
        self._unanswered.update(watch.request_id for watch in plan.watches)
        self._unanswered.difference_update(plan.drops)
        if plan.voids:
            self.fail_all("reset")
        with self._lock:
            for load in plan.loads:
                job = LoadJob(load, now_s + self._settings.read_deadline_s, self._step)
                self._active[load.request_id] = job
                if self._is_aside:
                    self._fail(job, "internal")
        self._plans.append(plan)

    def wait(self) -> None:
        """Until there is something to collect or to report, but not for long; not at all if it is
        not the mover's turn."""
        self._news.clear()
        is_under_way = bool(self._active or self._unanswered)
        if is_under_way and not self._has_news:
            self._news.wait(NEWS_WAIT_S)

    def collect(self) -> Finished:
        """Loads that have ended since the last call, after a look at the deadlines."""
        now_s = self._clock.now_s()
        with self._lock:
            for job in self._active.values():
                if now_s > job.deadline_s:
                    self._fail(job, "late")
            self._end_what_is_over()
            ended, self._ended = self._ended, []
        return Finished(
            frozenset(job.load.request_id for job in ended),
            frozenset(job.load.request_id for job in ended if job.failure),
        )

    def report(self) -> Report:
        """What the scheduler half has to know since the last call."""
        granted, refused = self._claims.granted, self._claims.refused
        if self._is_aside:
            plans = [self._plans.popleft() for _ in range(len(self._plans))]
            refused.extend((w.request_id, "internal") for plan in plans for w in plan.watches)
        report = Report(
            tuple(granted.popleft() for _ in range(len(granted))),
            tuple(refused.popleft() for _ in range(len(refused))),
            self._reads.is_full,
        )
        self._unanswered.difference_update(report.granted, (name for name, _ in report.refused))
        return report

    def fail_all(self, reason: str) -> None:
        """Every load under way fails: the weights have changed, or the mover stands aside."""
        with self._lock:
            for job in self._active.values():
                self._fail(job, reason)
            self._end_what_is_over()

    def stand_aside(self) -> bool:
        """The mover has failed: every load fails, now and later, as soon as nothing of it is being
        scattered. False while something is: call again. The mover's thread."""
        self._is_aside = True
        self.fail_all("internal")
        if not self._unloaders.drain():
            return False
        with self._lock:
            for job in self._active.values():
                job.unloading_count = 0
            self._end_what_is_over()
        return True

    # Mover's thread

    def step(self) -> bool:
        """One round. True if anything moved."""
        moved = bool(self._plans)
        while self._plans:
            self._take_plan(self._plans.popleft())
        moved = self.peers.step() or moved
        self._claims.step()
        self._lose(self._reads.step())
        self._lay_out()
        moved = self._post() or moved
        self._settle_confirmations()
        moved = self._unload() or moved
        with self._lock:
            self._end_what_is_over()
        while self._over:
            self._claims.let_go(self._over.popleft())
        if self._has_news:
            self._news.set()
        return moved

    def take(self, body: Body) -> None:
        """A message from a source."""
        if isinstance(body, Grant):
            self._claims.take(body)
        elif isinstance(body, Answer) and isinstance(self._reads, Invitations):
            with self._lock:
                chunk = self._reads.take(body)
            if chunk is not None:
                self._landed.append(chunk)

    def post_ended(self, event: PostEnded) -> None:
        with self._lock:
            chunk = self._reads.take(event)
        if chunk is None:
            return
        transfer = self._claims.of(chunk.job.load.request_id)
        rank = chunk.session.rank
        if transfer is not None and transfer.claims[rank].held.is_sure(chunk.ended_s):
            self._landed.append(chunk)
        elif transfer is not None and not transfer.refusal:
            self._metrics.count("kvferry_transfer_confirmations_total", outcome="asked")
            self._claims.confirm(transfer, rank)
            chunk.ended_serial = self._claims.serial
            self._confirming.append((transfer, chunk))
        else:
            self._drop(chunk, "expired")

    @property
    def out_count(self) -> int:
        """Reads that the link has not returned, or invitations that no source has answered."""
        return self._reads.out_count

    @property
    def exposed_to(self) -> set[str]:
        """Ends of sources that may still write into staging."""
        return self._reads.invited if isinstance(self._reads, Invitations) else set()

    @property
    def taken_count(self) -> int:
        """Slots of staging and pages that are in use."""
        return self._staging.taken_count + self._unloaders.taken_count

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do or to be told. Reads in quarantine may be out: who knows how
        long."""
        with self._lock:
            jobs = bool(self._active or self._ended or self._over)
        told = self._claims.granted or self._claims.refused
        is_clear = self.taken_count == self._reads.given_up_count
        return is_clear and self._claims.is_idle and not (jobs or told or self._plans)

    @property
    def _has_news(self) -> bool:
        return bool(self._ended or self._claims.granted or self._claims.refused)

    def _take_plan(self, plan: ConsumerPlan) -> None:
        for watch in plan.watches:
            self._claims.watch(watch.request_id, watch.offer)
        with self._lock:
            for request_id in plan.drops:
                job = self._active.get(request_id)
                if job is not None:
                    self._fail(job, "dropped")
                else:
                    self._over.append(request_id)

    def _lay_out(self) -> None:
        """Finds the chunks of loads that have not begun."""
        with self._lock:
            jobs = [j for j in self._active.values() if j.left_count is None and not j.failure]
        for job in jobs:
            transfer = self._claims.of(job.load.request_id)
            failure, chunks = self._chunks(job, transfer)
            with self._lock:
                if failure:
                    self._fail(job, failure)
                elif chunks is not None:
                    job.left_count = len(chunks)
                    self._waiting.extend(chunks)

    def _chunks(self, job: LoadJob, transfer: Transfer | None) -> tuple[str, list[ChunkJob] | None]:
        """Why there can be none, or all chunks; None while a source is not ready."""
        if self._reads.is_full:
            return "quarantine", None
        if transfer is None or transfer.refusal:
            return "refused" if transfer is None else transfer.refusal, None
        sessions = transfer.peer.sessions.values()
        if not transfer.is_granted or not all(session.is_ready for session in sessions):
            return "", None
        load, chunks = job.load, []
        try:
            for session in sessions:
                tables = transfer.claims[session.rank].tables
                for channel in session.channels:
                    chunks += [
                        ChunkJob(job, transfer.offer, session, channel, chunk)
                        for chunk in channel.chunks(tables, load)
                    ]
        except (UnavailableError, IndexError):
            return "blocks", None
        return "", chunks

    def _post(self) -> bool:
        """Starts the reads for which there is staging. Some transports copy while a read is posted:
        leases must be renewed and ends taken in between."""
        moved, end_s = False, self._clock.now_s() + POSTING_S
        while self._waiting and self._clock.now_s() <= end_s:
            chunk = self._waiting[0]
            if chunk.is_wanted and not chunk.session.is_ready:
                with self._lock:
                    self._fail(chunk.job, "lost")
            if chunk.is_wanted and not self._reads.post(chunk):
                break
            self._waiting.popleft()
            moved = True
        return moved

    def _settle_confirmations(self) -> None:
        waiting = []
        for transfer, chunk in self._confirming:
            claim = transfer.claims[chunk.session.rank]
            if not chunk.is_wanted:
                self._reads.give_back(chunk)
            elif transfer.refusal:
                self._drop(chunk, "expired")
            elif claim.answered_serial > chunk.ended_serial:
                self._metrics.count("kvferry_transfer_confirmations_total", outcome="confirmed")
                self._landed.append(chunk)
            else:
                waiting.append((transfer, chunk))
        self._confirming = waiting

    def _lose(self, chunks: Sequence[ChunkJob]) -> None:
        with self._lock:
            for chunk in chunks:
                self._fail(chunk.job, "lost")

    def _drop(self, chunk: ChunkJob, reason: str) -> None:
        """What was read may have been another request's."""
        self._metrics.count("kvferry_transfer_late_reads_total")
        self._reads.give_back(chunk)
        with self._lock:
            self._fail(chunk.job, reason)

    def _unload(self) -> bool:
        moved = False
        for _ in range(len(self._landed)):
            moved = self._begin_unloading(self._landed.popleft()) or moved
        for chunk in self._unloaders.step():
            self._reads.give_back(chunk)
            moved = True
            with self._lock:
                chunk.job.unloading_count -= 1
                chunk.job.left_count -= 1
                if chunk.is_torn:
                    self._metrics.count("kvferry_transfer_torn_pages_total")
                    self._fail(chunk.job, "torn")
        return moved

    def _begin_unloading(self, chunk: ChunkJob) -> bool:
        with self._lock:
            is_wanted = chunk.is_wanted
            if is_wanted:
                chunk.job.unloading_count += 1
        if not is_wanted:
            self._reads.give_back(chunk)
            return True
        unloader = chunk.channel.unloader
        if unloader.ordered_step >= chunk.job.step and unloader.begin(chunk):
            return True
        with self._lock:
            chunk.job.unloading_count -= 1
        self._landed.append(chunk)
        return False

    # Under the lock

    def _fail(self, job: LoadJob, reason: str) -> None:
        if not job.failure:
            job.failure = reason

    def _end_what_is_over(self) -> None:
        for job in [job for job in self._active.values() if job.is_over]:
            del self._active[job.load.request_id]
            self._ended.append(job)
            self._over.append(job.load.request_id)
            outcome = job.failure or "done"
            self._metrics.count("kvferry_transfer_loads_total", outcome=outcome)
