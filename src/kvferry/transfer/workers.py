"""A rank's worker half put together: link, rank, mover, opened and closed in the right order.

    open:   link, memory, rank, and `start` the mover
    close:  mover, link (it waits a little for reads), rank

A mover that hangs in its transport keeps its link: nobody else may call that, so it stays open.

Each role has a link of its own: what a producer exposes is not on the link that a consumer reads
with.
"""

from collections.abc import Callable, Sequence

from kvferry.clock import Clock
from kvferry.device.staging import Allocate, host_memory
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link, Range
from kvferry.transfer.compatibility import Compatibility
from kvferry.transfer.consumer_rank import ConsumerRank
from kvferry.transfer.handshake import RankEnd, dial
from kvferry.transfer.landing import CopierMaker
from kvferry.transfer.mover import Mover
from kvferry.transfer.producer_rank import ProducerRank
from kvferry.transfer.session import Dialer, Peers, ThreadDialer
from kvferry.transfer.settings import Settings, check_settings
from kvferry.transfer.topology import RankLayout
from kvferry.transfer.unload import Unloaders

CLOSE_S = 5.0


class ProducerWorker:
    """`memory`: the engine's own storages that hold the regions of `layout`, few and large: what
    readers may read. A producer that pushes exposes nothing: it writes out of memory that
    `allocate` takes and `make_copier`'s copiers reach."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        layout: RankLayout,
        memory: Sequence[Range],
        make_copier: CopierMaker,
        allocate: Allocate = host_memory,
    ):
        self._settings = settings
        self._link = link
        self._layout = layout
        self._memory = tuple(memory) if settings.direction == "pull" else ()
        self._end: RankEnd | None = None
        self.rank = ProducerRank(settings, clock, metrics, link, layout, make_copier, allocate)
        self.mover = Mover(settings, clock, metrics, link, self.rank)

    def open(self) -> RankEnd:
        """What the listener must tell about this rank. The engine's thread."""
        check_settings(self._settings)
        self._link.open()
        for memory in self._memory:
            self._link.register(memory)
        self.rank.open()
        return RankEnd(self._layout, self._link.describe(self._memory))

    def start(self) -> None:
        self.mover.start()

    def close(self) -> bool:
        """False if the link is still in use: `memory` must stay mapped as long as the process
        lives."""
        is_clear = self.mover.close(CLOSE_S) and self._link.close(CLOSE_S)
        if is_clear:
            self.rank.close()
        return is_clear


class ConsumerWorker:
    """`targets`: the layouts of all ranks of this engine, `layout` is the one of this rank.
    `allocate`: takes memory that `link` can register and copiers can reach."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        layout: RankLayout,
        targets: Sequence[RankLayout],
        compatibility: Compatibility,
        make_copier: CopierMaker,
        allocate: Allocate = host_memory,
        make_dialer: Callable[[Callable], Dialer] = ThreadDialer,
    ):
        self._settings = settings
        self._link = link
        unloaders = Unloaders(make_copier, settings.slot_bytes, allocate)
        dialer = make_dialer(
            lambda offer: dial(offer.host, offer.port, offer.boot, compatibility, settings, clock)
        )
        peers = Peers(settings, clock, metrics, link, dialer, layout, targets, unloaders)
        self.rank = ConsumerRank(
            settings, clock, metrics, link, peers, unloaders, layout.rank, allocate
        )
        self.mover = Mover(settings, clock, metrics, link, self.rank)

    def open(self) -> None:
        check_settings(self._settings)
        self._link.open()
        self.rank.open()

    def start(self) -> None:
        self.mover.start()

    def close(self) -> bool:
        """False if reads or writes are out that nobody can call back: staging stays mapped for
        them. A producer of this host may write here without our help (shared memory)."""
        is_clear = self.mover.close(CLOSE_S) and self._link.close(CLOSE_S)
        self.rank.close()
        return is_clear and not self.rank.exposed_to
