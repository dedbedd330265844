"""The producer's worker half: answers claims for this rank's blocks.

Readers read without asking; all that happens here is that leases are prolonged while somebody
claims them, and end. With `pushes` nobody reads: they write what readers invite. `begin` and
`take_ended` are the engine's thread's, the rest the mover's.
"""

import threading
from collections import deque
from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.device.staging import Allocate, host_memory
from kvferry.errors import IncompatibleError, UnavailableError
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link, PostEnded
from kvferry.transfer.halves import Begin, Hold, ProducerPlan, Progress, Tables
from kvferry.transfer.landing import CopierMaker
from kvferry.transfer.lease import LeaseBook
from kvferry.transfer.messages import (
    Answer,
    Body,
    Claim,
    Grant,
    Invite,
    Release,
    Stop,
    seal_message,
)
from kvferry.transfer.pushes import Pushes
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import RankLayout


@dataclass(slots=True)
class _Reader:
    """Who can be answered. `heard_s`: when it last said something."""

    description: bytes
    heard_s: float = 0.0


class ProducerRank:
    """See the module. The link is the mover's. The book is under `_lock`, which nobody holds while
    the link works: leases end in time whatever the mover does. `open` only if it pushes; `close`
    after the link's.

    `make_copier`: where `direction` is `push`, of what gathers from this rank's `layout`.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        layout: RankLayout,
        make_copier: CopierMaker,
        allocate: Allocate = host_memory,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._lock = threading.Lock()
        self._book = LeaseBook(settings, clock)
        self._answers: deque[tuple[Claim, Grant]] = deque()
        self._running: set[str] = set()  # begun, neither held nor cancelled
        self._early_ended: set[str] = set()  # whose lease was over before
        self._progress: tuple[Progress, ...] = ()
        self._readers: dict[str, _Reader] = {}
        self._pushes: Pushes | None = None
        if settings.direction == "push":
            self._pushes = Pushes(
                settings,
                clock,
                metrics,
                link,
                layout,
                make_copier,
                allocate,
                self._book,
                self._lock,
                self._send,
            )
        self._away: dict[bytes, float] = {}

    def open(self) -> None:
        """The link is open."""
        if self._pushes is not None:
            self._pushes.open()

    def close(self) -> None:
        if self._pushes is not None:
            self._pushes.close()

    # Engine's thread

    def begin(self, plan: ProducerPlan) -> None:
        """Each step before it is computed, also without news."""
        with self._lock:
            if self._pushes is not None:
                self._take_news(plan, self._pushes)
            for hold in plan.holds:
                if hold.request_id in self._running:
                    self._running.discard(hold.request_id)
                else:
                    self._begin(hold, hold.tables)
                if self._pushes is not None:
                    self._pushes.keep(hold)

    def take_ended(self) -> set[str]:
        """Requests whose lease is over at this rank since the last call, each once. Each step,
        after it was computed."""
        with self._lock:
            self._grow()
            self._book.end_expired()
            ended = self._book.take_ended()
            self._metrics.set("kvferry_transfer_leases_held", self._book.lease_count)
            self._metrics.set("kvferry_transfer_oldest_lease_seconds", self._book.oldest_s)
        for _, reason in ended:
            self._metrics.count("kvferry_transfer_leases_ended_total", reason=reason)
        self._early_ended.update(request_id for request_id, _ in ended)
        found = self._early_ended - self._running
        self._early_ended -= found
        return found

    def _take_news(self, plan: ProducerPlan, pushes: Pushes) -> None:
        for request_id in (*plan.withdrawn, *plan.cancelled):
            pushes.withdraw(request_id)
        for request_id in plan.cancelled:
            if self._book.cancel(request_id):
                self._metrics.count("kvferry_transfer_leases_ended_total", reason="cancelled")
            self._running.discard(request_id)
            self._early_ended.discard(request_id)
        for begin in plan.begins:
            self._running.add(begin.request_id)
            self._begin(begin, ())
        self._progress += plan.progress

    def _begin(self, begun: Begin | Hold, tables: Tables) -> None:
        self._answers += self._book.begin(
            begun.request_id, begun.transfer, begun.generation, begun.token_count, tables
        )
        if self._pushes is not None:
            self._pushes.begin(begun)

    def _grow(self) -> None:
        """What the step that was begun last has computed is final now."""
        if self._pushes is not None and self._progress:
            self._pushes.order()
            for progress in self._progress:
                self._pushes.grow(progress)
            self._progress = ()

    @property
    def is_idle(self) -> bool:
        with self._lock:
            is_idle = not self._answers and self._book.is_empty
        return is_idle and (self._pushes is None or self._pushes.is_idle)

    # Mover's thread

    def step(self) -> bool:
        """One round. True if anything moved."""
        with self._lock:
            self._answers += self._book.expire()
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
        for claim, grant in answers:
            self._answer(claim, grant)
        self._forget_idle()
        moved = self._pushes is not None and self._pushes.step()
        return moved or bool(answers)

    def post_ended(self, event: PostEnded) -> None:
        """Only pushes post."""
        self._pushes.post_ended(event)

    def take(self, body: Body) -> None:
        """A message from a reader."""
        grant = None
        with self._lock:
            if isinstance(body, Claim):
                grant = self._book.claim(body)
            elif isinstance(body, Release):
                self._book.release(body)
        if grant is not None:
            self._answer(body, grant)
        if isinstance(body, Invite | Stop) and self._pushes is not None and self._meet(body):
            self._pushes.take(body)

    def stand_aside(self) -> bool:
        """The mover has failed: claims are not answered any more, and leases run out."""
        return True

    def _answer(self, claim: Claim, grant: Grant) -> None:
        """Best effort: a reader that gets no answer asks again."""
        name = claim.sender
        if not self._meet(claim):
            self._metrics.count("kvferry_transfer_messages_dropped_total", reason="no_way_back")
            return
        grant = Grant(
            self._link.name,
            grant.serial,
            grant.transfer,
            grant.generation,
            grant.state,
            grant.valid_s,
            grant.token_count,
            grant.tables if self._pushes is None else (),
        )
        self._send(name, grant)

    def _send(self, name: str, body: Grant | Answer) -> None:
        if not self._link.notify(name, seal_message(self._settings.secret, name, body)):
            self._metrics.count("kvferry_transfer_messages_dropped_total", reason="no_way_back")
            if name in self._readers:
                self._forget(
                    name
                )  # what is known of the way is stale: the next claim makes it anew

    def _meet(self, claim: Claim | Invite | Stop) -> bool:
        """Knows the way back to who sent it, by what it says. Who cannot be reached is left alone
        for a while: he may have died with many claims under way, and each connection to a process
        that is gone costs a socket for ever (UCX over tcp, NIXL 1.5.1)."""
        reader = self._readers.get(claim.sender)
        if reader is None or reader.description != claim.description:
            now_s = self._clock.now_s()
            if now_s < self._away.get(claim.description, now_s):
                return False
            try:
                name = self._link.connect(claim.description)
            except (IncompatibleError, UnavailableError):
                self._away = {who: end_s for who, end_s in self._away.items() if now_s < end_s}
                self._away[claim.description] = now_s + self._settings.redial_s
                return False
            reader = self._readers[name] = _Reader(claim.description)
        reader.heard_s = self._clock.now_s()
        return claim.sender in self._readers

    def _forget_idle(self) -> None:
        idle_since_s = self._clock.now_s() - self._settings.peer_idle_s
        for name in [n for n, reader in self._readers.items() if reader.heard_s < idle_since_s]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Not while something is being written to it: that ends, and it will be asked again."""
        if self._pushes is not None and not self._pushes.may_forget(name):
            return
        del self._readers[name]
        self._link.disconnect(name)
