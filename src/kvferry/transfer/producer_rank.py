"""The producer's worker half: answers claims for this rank's blocks.

Readers read without asking; all that happens here is that leases are prolonged while somebody
claims them, and end. `begin` and `take_ended` are the engine's thread's, the rest the mover's.
"""

import threading
from collections import deque
from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.errors import IncompatibleError, UnavailableError
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link
from kvferry.transfer.halves import ProducerPlan
from kvferry.transfer.lease import LeaseBook
from kvferry.transfer.messages import Body, Claim, Grant, Release, seal_message
from kvferry.transfer.settings import Settings


@dataclass(slots=True)
class _Reader:
    """Who can be answered. `heard_s`: when it last said something."""

    description: bytes
    heard_s: float = 0.0


class ProducerRank:
    """See the module. The link is the mover's; nobody reads with it. The book is under `_lock`,
    which nobody holds while the link works: leases end in time whatever the mover does."""

    def __init__(self, settings: Settings, clock: Clock, metrics: Metrics, link: Link):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._lock = threading.Lock()
        self._book = LeaseBook(settings, clock)
        self._answers: deque[tuple[Claim, Grant]] = deque()
        self._readers: dict[str, _Reader] = {}
        self._away: dict[bytes, float] = {}

    # Engine's thread

    def begin(self, plan: ProducerPlan) -> None:
        """Each step, also without news."""
        with self._lock:
            for hold in plan.holds:
                self._answers += self._book.begin(
                    hold.request_id,
                    hold.transfer,
                    hold.generation,
                    hold.token_count,
                    hold.tables,
                )

    def take_ended(self) -> set[str]:
        """Requests whose lease is over at this rank since the last call, each once."""
        with self._lock:
            self._book.end_expired()
            ended = self._book.take_ended()
            self._metrics.set("kvferry_transfer_leases_held", self._book.lease_count)
            self._metrics.set("kvferry_transfer_oldest_lease_seconds", self._book.oldest_s)
        for _, reason in ended:
            self._metrics.count("kvferry_transfer_leases_ended_total", reason=reason)
        return {request_id for request_id, _ in ended}

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._answers and self._book.is_empty

    # Mover's thread

    def step(self) -> bool:
        """One round. True if anything moved."""
        with self._lock:
            self._answers += self._book.expire()
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
        for claim, grant in answers:
            self._answer(claim, grant)
        self._forget_idle()
        return bool(answers)

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
            grant.tables,
        )
        if not self._link.notify(name, seal_message(self._settings.secret, name, grant)):
            self._metrics.count("kvferry_transfer_messages_dropped_total", reason="no_way_back")
            self._forget(name)  # what is known of the way is stale: the next claim connects anew

    def _meet(self, claim: Claim) -> bool:
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
        del self._readers[name]
        self._link.disconnect(name)
