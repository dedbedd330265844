"""The worker half: what the engine's thread calls in each step.

    before_step    the fence: no gather needs a block that this step may overwrite; loads begin
    after_forward  the step's full chunks are final: their gathers begin
    collect        loads that ended, each once
    report         the rank's word to the scheduler side

The work itself is the mover's. One thread: the engine's, except where a method says otherwise.
"""

from collections.abc import Callable, Sequence

from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.device.staging import Staging
from kvferry.metrics import Metrics
from kvferry.offload.base import Finished, Identity, Load, Plan, Report, Store
from kvferry.offload.worker.load_jobs import BadPage, LoadJob, LoadJobs
from kvferry.offload.worker.mover import Mover
from kvferry.offload.worker.ranks import RankPart
from kvferry.offload.worker.store_jobs import StoreJobs

EMPTY_STEP_WAIT_S = 0.0005
"""A step that computes nothing is taken because requests wait for us: it lets the threads that
they wait for have the interpreter for this long."""

LOADING_WAIT_S = 0.005
"""The same while a load is under way: the wait ends with the load."""

DRAIN_S = 2.0
"""How long `close` lets stores under way finish."""


class Jobs:
    """See the module. `parts`: this rank's, by place. `closers` run in order at `close`."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        metrics: Metrics,
        identity: Identity,
        parts: Sequence[RankPart],
        staging: Staging,
        loads: LoadJobs,
        stores: StoreJobs,
        mover: Mover,
        closers: Sequence[Callable[[], None]] = (),
    ):
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._identity: Identity | None = identity
        self._parts = {part.place: part for part in parts}
        self._by_index: list[RankPart | None] = []
        self._names: tuple = ()
        self._staging = staging
        self._loads = loads
        self._stores = stores
        self._mover = mover
        self._closers = list(closers)
        self._next_stores: tuple[Store, ...] = ()
        self._failed_keys: list[tuple[bytes, bytes]] = []
        self._loaded_tokens = 0

    def before_step(self, plan: Plan) -> None:
        """Before the step may overwrite anything. What gathers its blocks comes first."""
        if plan.drop_stores:
            self._stores.drop_all("reset")
            self._loads.void_all()
        if plan.parts != self._names:
            self._rename(plan)
        self._add_stores(plan.late_stores)
        self._stores.lose(plan.rewritten)
        self._stores.fence(plan.overwritten)
        self._add_loads(plan.loads)
        if self._mover.has_failed:
            self._loads.void_all()
        self._next_stores = plan.stores
        if plan.tries_store:
            self._mover.trial.ask()
        if plan.loads or plan.late_stores or plan.tries_store:
            self._mover.wake()

    def after_forward(self, is_empty_step: bool) -> None:
        """After the forward of the step whose plan came last."""
        self._mover.leave_room(not is_empty_step)
        stores, self._next_stores = self._next_stores, ()
        if stores:
            self._add_stores(stores)
            self._mover.wake()
        if is_empty_step:
            is_loading = self._loads.pending_count > 0
            self._loads.progress.wait(LOADING_WAIT_S if is_loading else EMPTY_STEP_WAIT_S)

    def collect(self) -> Finished:
        """Loads that ended since the last call."""
        if self._loads.is_scattering:  # the mover may be late
            self._mover.take_copies()
        ended, bad_pages = self._loads.collect()
        self._settle(bad_pages)
        if not ended:
            return Finished()
        for job in ended:
            self._count(job)
        failed = [job for job in ended if job.has_failed]
        return Finished(
            done=frozenset(job.load.request_id for job in ended),
            failed=frozenset(job.load.request_id for job in failed),
            failed_blocks=frozenset(block for job in failed for block in job.failed_blocks()),
        )

    def report(self) -> Report | None:
        """What there is to say, once; None if nothing."""
        used_bytes = self._staging.taken_count * self._staging.slot_bytes
        self._metrics.set("kvferry_staging_used_bytes", used_bytes)
        identities = (self._identity,) if self._identity else ()
        tried_tokens, tried_s = self._mover.trial.take()
        loaded_tokens = self._loaded_tokens + tried_tokens
        if not (identities or self._failed_keys or loaded_tokens):
            return None
        is_load = bool(self._loaded_tokens) or not tried_tokens
        loading_s = tried_s + (self._loads.take_busy_s() if is_load else 0.0)
        report = Report(identities, tuple(self._failed_keys), loaded_tokens, loading_s)
        self._identity, self._failed_keys, self._loaded_tokens = None, [], 0
        return report

    def is_idle(self) -> bool:
        """Nothing is under way and all staging is back."""
        return not (self._mover.pending_count or self._staging.taken_count)

    def close(self) -> None:
        """Lets stores finish for a short while, then lets go of everything. Idempotent."""
        if self._mover.is_running:
            give_up_s = self._clock.now_s() + DRAIN_S
            while self._mover.pending_count and self._clock.now_s() < give_up_s:
                self._clock.sleep(0.005)
        self._mover.close(DRAIN_S)
        closers, self._closers = self._closers, []
        for close in closers:
            close()

    def _rename(self, plan: Plan) -> None:
        self._names = plan.parts
        self._by_index = []
        for stage, group_index, namespace in plan.parts:
            part = self._parts.get((stage, group_index))
            self._by_index.append(part and part.renamed(namespace))
        self._stores.watch(part.copier for part in self._parts.values())

    def _add_loads(self, loads: Sequence[Load]) -> None:
        if loads:
            for part in self._parts.values():
                part.copier.order_scatters()
        for load in loads:
            self._loads.add(self._by_index, load)

    def _add_stores(self, stores: Sequence[Store]) -> None:
        if stores:
            for part in self._parts.values():
                part.copier.order_gathers()
        for store in stores:
            part = self._by_index[store.span.part_index]
            if part is not None and not self._mover.has_failed:
                self._stores.add(part, store, self._config.store_deadline_s)

    def _settle(self, bad_pages: Sequence[BadPage]) -> None:
        gone: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for page in bad_pages:
            self._failed_keys.append((page.namespace, page.key))
            if page.is_gone:
                gone.setdefault(page.namespace, []).append((page.key, page.generation))
        for namespace, pages in gone.items():
            self._mover.evict(namespace, pages)

    def _count(self, job: LoadJob) -> None:
        duration_s = self._clock.now_s() - job.started_s
        loaded = [piece for piece in job.pieces if piece.is_loaded]
        self._metrics.observe("kvferry_load_seconds", duration_s)
        whole = "loaded" if not job.has_failed else "partial" if loaded else "failed"
        self._metrics.count("kvferry_loads_total", outcome=whole)
        if not job.has_failed:
            tokens = job.load.end_token - job.load.start_token
            self._loaded_tokens += tokens
            self._metrics.count("kvferry_loaded_tokens_total", tokens)
