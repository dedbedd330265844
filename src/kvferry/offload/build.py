"""Puts the two halves together from a configuration: what opens in which order, and closes.

A mistake in the configuration is a ConfigError here, so that the engine does not start. A catalog
that does not answer is none: the engine starts without it, and opening is tried again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry import _native
from kvferry.catalog.base import Catalog, Policy
from kvferry.catalog.measured import MeasuredCatalog
from kvferry.catalog.open import open_url as make_catalog
from kvferry.catalog.reviving import RevivingCatalog
from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.device.base import Copier
from kvferry.device.host import HostCopier
from kvferry.device.staging import Staging, memory_from
from kvferry.errors import ConfigError, IncompatibleError
from kvferry.keys import tenant_id
from kvferry.metrics import Metrics
from kvferry.offload.base import Identity, LocalPart
from kvferry.offload.scheduler.announcer import Describe
from kvferry.offload.scheduler.planner import Planner
from kvferry.offload.space.growth import PATIENCE_S, Growth
from kvferry.offload.space.quotas import tell_quotas
from kvferry.offload.space.recovery import recover
from kvferry.offload.worker.jobs import Jobs
from kvferry.offload.worker.load_jobs import LoadJobs
from kvferry.offload.worker.mover import Mover
from kvferry.offload.worker.ranks import RankPart
from kvferry.offload.worker.store_jobs import StoreJobs
from kvferry.offload.worker.trial import Trial
from kvferry.pages.base import PageStore, StoreFacts
from kvferry.pages.facts import Asked
from kvferry.pages.open import open_roots as open_pages
from kvferry.pages.open import require_path
from kvferry.pages.owner import OWNER_LEASE_S, StoreOwnership
from kvferry.pages.threads import read_threads

log = logging.getLogger(__name__)

OPEN_WAIT_S = 15.0
"""How long a start waits for the catalog: longer than a silent owner's lease."""
REOPEN_S = 5.0
TEND_S = 1.0
GAUGES_S = 10.0
CLOSE_S = 2.0
READS_IN_LINE = 4
"""Reads that are out beyond one for each thread, so that none waits for the mover."""

OpenCopiers = Callable[[Staging, Sequence[LocalPart]], "OpenedCopiers"]
"""Opens a copier for each part, over staging that is open and outlives them."""


@dataclass(frozen=True, slots=True)
class OpenedCopiers:
    """`by_part`: in the order of the parts. `close`: what they share, after each was closed."""

    by_part: Sequence[Copier]
    close: Callable[[], None] = lambda: None


class Backends:
    """The open page store and the catalog of one process half, with the runner that calls it.

    `prepare`: what follows the opening of the catalog, on the runner thread.
    """

    def __init__(self, config: Config, clock: Clock, metrics: Metrics, page_bytes: int = 0):
        self._config = config
        self._clock = clock
        self.metrics = metrics
        self.pages: PageStore = _open_pages(config, clock, page_bytes)
        self.facts: StoreFacts = self.pages.open()
        url = config.catalog_url(self.facts.store_id)
        policy = Policy(config.eviction)
        catalog = make_catalog(url, clock, grace_s=config.grace_s, policy=policy)
        self.catalog: Catalog = MeasuredCatalog(
            RevivingCatalog(catalog, self._revive), clock, metrics
        )
        self.runner = Runner(clock, metrics)
        self._is_open = False
        self._prepare: Callable[[], None] = lambda: None

    def start(self, prepare: Callable[[], None] | None = None) -> None:
        """Starts the runner and opens the catalog on it; waits for that, but not for ever."""
        self._prepare = prepare or self._prepare
        self.runner.start()
        self._await(self.runner.submit(self._open, OPEN_WAIT_S))
        if not self._is_open:
            log.warning("the catalog does not answer: starting without it")
            self.runner.periodic(self._open, REOPEN_S)

    def show_space(self) -> None:
        """Gauges of what the store holds. On the runner thread."""
        stats = self.catalog.stats()
        page_count = sum(space.page_count for space in stats.spaces)
        self.metrics.set("kvferry_pages", page_count)
        self.metrics.set("kvferry_capacity_bytes", stats.capacity_bytes)
        self.metrics.set("kvferry_used_bytes", self.pages.used_bytes())

    def close(self) -> None:
        self.runner.close(CLOSE_S)
        self.catalog.close()
        self.pages.close()

    def _open(self) -> None:
        if not self._is_open:
            self._open_again()
            self._is_open = True

    def _open_again(self) -> None:
        facts = self.facts
        self.catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
        self._prepare()

    def _revive(self) -> None:
        log.warning("the catalog was lost: opening it again")
        self.metrics.count("kvferry_catalog_losses_total")
        self._open_again()

    def _await(self, ticket: Ticket) -> None:
        while ticket.state(self._clock.now_s()) is TicketState.PENDING:
            self._clock.sleep(0.002)
        if isinstance(ticket.error, ConfigError | IncompatibleError):
            self.close()
            raise ticket.error


def _open_pages(config: Config, clock: Clock, page_bytes: int) -> PageStore:
    asked = Asked(config.capacity_bytes, config.alignment_bytes, config.segment_bytes, page_bytes)
    return open_pages(
        config.roots,
        clock,
        asked,
        direct_io=config.direct_io,
        read_thread_count=config.read_threads,
        write_thread_count=config.write_threads,
        usrbio_library=config.usrbio_library,
    )


class _Tenure:
    """The scheduler side's part in owning the store: runs on the runner thread."""

    def __init__(self, config: Config, clock: Clock, backends: Backends):
        self._root: Path | None = require_path(config.home)
        self._clock = clock
        self._backends = backends
        self._ownership: StoreOwnership | None = None
        self._has_begun = False

    def begin(self) -> None:
        """After each opening of the catalog, which may be another one than before."""
        backends = self._backends
        self._has_begun = False
        is_first = self._ownership is None
        self.end()
        if self._root is not None:
            catalog_id = backends.catalog.catalog_id.hex()
            self._ownership = StoreOwnership(self._root, catalog_id, self._clock)
            if self._ownership.acquire(OWNER_LEASE_S) and is_first:
                backends.metrics.count("kvferry_catalog_takeovers_total")
            tell_quotas(backends.catalog, self._root, backends.facts)
        recover(backends.catalog, backends.pages, backends.facts, backends.metrics)
        self._has_begun = True

    def beat(self) -> None:
        """An owner whose catalog does not answer falls silent, so that whoever has another one
        may have the store."""
        if self._ownership is not None:
            self._backends.catalog.stats()
            self._ownership.beat()

    @property
    def is_held(self) -> bool:
        return self._has_begun and (self._ownership is None or self._ownership.holds)

    def end(self) -> None:
        if self._ownership is not None:
            self._ownership.release()


def open_planner(
    config: Config,
    clock: Clock,
    metrics: Metrics,
    rank_count: int,
    describe: Describe | None = None,
) -> Planner:
    """The scheduler half, open and running. `describe`: for `Planner.take_events`. `Planner.close`
    closes all that was opened here."""
    backends = Backends(config, clock, metrics)
    tenure = _Tenure(config, clock, backends)
    files = Runner(clock)
    growth = Growth(backends.catalog, backends.pages, files, clock, metrics, PATIENCE_S)
    planner = Planner(
        config,
        clock,
        metrics,
        backends.catalog,
        backends.pages,
        backends.facts,
        backends.runner,
        growth,
        _native.chain_keys,
        rank_count,
        may_reserve=lambda: tenure.is_held,
        describe=describe,
        closers=(
            lambda: backends.runner.submit(tenure.end, CLOSE_S),
            lambda: files.close(CLOSE_S),
            lambda: backends.runner.submit(growth.settle, CLOSE_S),
            backends.close,
        ),
    )
    files.start()
    backends.start(tenure.begin)
    backends.runner.periodic(tenure.beat, OWNER_LEASE_S / 4)
    backends.runner.periodic(planner.tend, TEND_S)
    backends.runner.periodic(backends.show_space, GAUGES_S)
    return planner


def open_jobs(
    config: Config,
    clock: Clock,
    metrics: Metrics,
    rank: int,
    rank_count: int,
    stage: int,
    local_parts: Sequence[LocalPart],
    open_copiers: OpenCopiers | None = None,
) -> Jobs:
    """The worker half of one rank, open and running. The regions of `local_parts` must stay valid
    until `Jobs.close`. `open_copiers`: for memory that the host cannot copy."""
    page_bytes = max(local.part.geometry.page_bytes for local in local_parts)
    backends = Backends(config, clock, metrics, page_bytes)
    metrics.set("kvferry_buffered_io", 0 if getattr(backends.pages, "direct_io", False) else 1)
    tenant = tenant_id(config.tenant)
    staging = Staging(
        config.staging_bytes,
        max(local.extent_bytes for local in local_parts),
        memory_from(backends.pages.allocate),
    )
    staging.open()
    copiers = (open_copiers or _host_copiers(config))(staging, local_parts)
    parts = [
        RankPart(local, copier, tenant, local.part.namespace)
        for local, copier in zip(local_parts, copiers.by_part, strict=True)
    ]
    backends.pages.register(staging.address, staging.length_bytes)
    reads_max = (config.read_threads or read_threads()) + READS_IN_LINE
    loads = LoadJobs(backends.pages, staging, clock, metrics, reads_max)
    stores = StoreJobs(backends.pages, staging, clock, metrics)
    trial = Trial(backends.pages, staging, backends.runner, clock, parts)
    mover = Mover(
        config,
        clock,
        metrics,
        backends.catalog,
        backends.pages,
        backends.runner,
        loads,
        stores,
        trial,
    )
    identity = Identity(
        rank,
        rank_count,
        stage,
        backends.facts.store_id,
        tuple(local.part for local in local_parts),
    )
    closers = [copier.close for copier in copiers.by_part]
    closers += [copiers.close, backends.close, staging.close]
    backends.start()
    mover.start()
    return Jobs(config, clock, metrics, identity, parts, staging, loads, stores, mover, closers)


def _host_copiers(config: Config) -> OpenCopiers:
    def open_copiers(_: Staging, local_parts: Sequence[LocalPart]) -> OpenedCopiers:
        copiers = [
            HostCopier(local.regions, local.part.geometry, config.copy_threads)
            for local in local_parts
        ]
        for copier in copiers:
            copier.open()
        return OpenedCopiers(copiers)

    return open_copiers
