"""The mover: the one thread of a worker that drives loads and stores.

It submits batches to the page store and the copiers, which work in native threads without the
GIL, and takes what they return. `step` is one round; tests and the simulated world call it by
hand, `start` lets a thread do it. It waits in the page store while bytes are out, and otherwise
sleeps until the engine's thread has something new.
"""

import functools
import logging
import threading

from kvferry.catalog.base import Catalog
from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.metrics import Metrics
from kvferry.offload.worker.load_jobs import LoadJobs
from kvferry.offload.worker.store_jobs import StoreJob, StoreJobs, commit_of
from kvferry.offload.worker.trial import Trial
from kvferry.pages.base import PageStore

log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.001
"""While copies are out: they have no handle to wait on that the page store knows."""
BATCH_WAIT_S = 0.001
"""While reads are out: scatters of several pages at once cost little more than those of one."""
IDLE_WAIT_S = 0.05


class Mover:
    """Owns the page store's submitting side. Threads: its own after `start`, else the caller's."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        metrics: Metrics,
        catalog: Catalog,
        pages: PageStore,
        runner: Runner,
        loads: LoadJobs,
        stores: StoreJobs,
        trial: Trial,
    ):
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._catalog = catalog
        self._pages = pages
        self._roots_out = getattr(pages, "out_count", None)  # only where there are several
        self._runner = runner
        self._loads = loads
        self._stores = stores
        self.trial = trial
        self._commits: list[tuple[Ticket, list[StoreJob]]] = []
        self._wake = threading.Event()
        self._must_stop = False
        self._leaves_room = False
        self._thread: threading.Thread | None = None
        self.has_failed = False
        self._overdue_count = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending_count(self) -> int:
        """Loads, reads and stores that have not ended, commits included. Any thread."""
        under_way = self._loads.pending_count + self._stores.pending_count
        under_way += self.trial.pending_count
        return under_way + sum(len(jobs) for _, jobs in self._commits)

    def wake(self) -> None:
        """There is something new. Any thread."""
        self._wake.set()

    def leave_room(self, is_wanted: bool) -> None:
        """Whether the engine computes while bytes move. Any thread."""
        if is_wanted is not self._leaves_room:
            self._leaves_room = is_wanted
            self._pages.leave_room(is_wanted)

    def close(self, timeout_s: float) -> None:
        """Stops the thread; waits for it at most this long. Idempotent."""
        self._must_stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def step(self, timeout_s: float = 0.0) -> bool:
        """One round: loads before stores. True if anything moved."""
        moved = self.take_copies()
        moved = self._loads.advance() or moved
        moved = self._stores.advance() or moved
        self.trial.advance()
        results = self._pages.wait(timeout_s) if timeout_s else self._pages.poll()
        reads = self.trial.read([each for each in results if not self._stores.written(each)])
        if reads:
            self._loads.read(reads)
        self._commit()
        self._settle_commits()
        self._metrics.set("kvferry_loads_pending", self._loads.pending_count)
        self._metrics.set("kvferry_stores_pending", self._stores.pending_count)
        if self._roots_out is not None:
            self._metrics.set("kvferry_roots_out", self._roots_out())
        self._count_overdue()
        return moved or bool(results)

    def _count_overdue(self) -> None:
        overdue = self._pages.overdue()
        self._metrics.set("kvferry_overdue_ios", overdue.now_count)
        if overdue.ever_count > self._overdue_count:
            new_count = overdue.ever_count - self._overdue_count
            self._metrics.count("kvferry_ios_overdue_total", new_count)
            self._overdue_count = overdue.ever_count

    def take_copies(self) -> bool:
        """Passes on what the copiers have done. True if there were scatters. Any thread."""
        scatters = self._stores.poll_copies()
        for copier, copy in scatters:
            self._loads.scattered(copier, copy)
        return bool(scatters)

    def _run(self) -> None:
        while not self._must_stop:
            self._wake.clear()
            try:
                moved = self.step(BATCH_WAIT_S if self._loads.is_reading else 0.0)
                if not moved and not self._wait():
                    self._wake.wait(IDLE_WAIT_S)
            # The job runner's edge: whatever a backend does, the engine serves on.
            except Exception as error:
                self._stand_aside(error)
                return

    def _wait(self) -> bool:
        """Waits for bytes that are out. False if there are none."""
        if not self.pending_count:
            return False
        if not self._wake.is_set():
            self.step(BUSY_WAIT_S)
        return True

    def _stand_aside(self, error: Exception) -> None:
        """Every open record is settled: loads fail, stores are dropped, nothing new is begun."""
        self._metrics.count("kvferry_internal_errors_total", where="jobs")
        log.error("kvferry's mover stands aside: %s", error, exc_info=error)
        self.has_failed = True
        self._stores.drop_all("closing")
        self._loads.void_all()
        self._commits = []
        while self._loads.is_scattering and not self._must_stop:
            self.take_copies()  # their blocks are the copiers' until then
            self._clock.sleep(BUSY_WAIT_S)

    def _commit(self) -> None:
        for part, jobs in self._stores.take_commits().items():
            commits = [commit_of(job) for job in jobs]
            work = functools.partial(self._catalog.commit, part.namespace, commits)
            ticket = self._runner.submit(work, self._config.store_deadline_s)
            self._commits.append((ticket, jobs))

    def _settle_commits(self) -> None:
        now_s, waiting = self._clock.now_s(), []
        for ticket, jobs in self._commits:
            state = ticket.state(now_s)
            if state is TicketState.PENDING:
                waiting.append((ticket, jobs))
                continue
            verdicts = ticket.value if state is TicketState.DONE else [None] * len(jobs)
            for job, verdict in zip(jobs, verdicts, strict=True):
                self._stores.committed(job, verdict)
        self._commits = waiting

    def evict(self, namespace: bytes, pages: list[tuple[bytes, bytes]]) -> None:
        """Takes pages that turned out bad out of the catalog, when the runner gets to it."""
        work = functools.partial(self._evict, namespace, pages)
        self._runner.submit(work, self._config.store_deadline_s)

    def _evict(self, namespace: bytes, pages: list[tuple[bytes, bytes]]) -> None:
        count = self._catalog.evict(namespace, pages)
        self._metrics.count("kvferry_evictions_of_bad_total", count)
