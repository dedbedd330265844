"""The mover: the one thread of a worker that owns a link and drives what uses it.

`step` is one round; tests and the simulated world call it by hand, `start` lets a thread do it. A
round takes what the link has returned, then lets the rank go on. Links have nothing to wait on, so
the thread looks again after a millisecond while something is under way, and less often otherwise.
"""

import logging
import threading
from typing import Protocol

from kvferry.clock import Clock
from kvferry.errors import IncompatibleError
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link, Message, PostEnded
from kvferry.transfer.consumer_rank import ConsumerRank
from kvferry.transfer.messages import Body, unseal_message
from kvferry.transfer.producer_rank import ProducerRank
from kvferry.transfer.settings import Settings

log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.001
IDLE_WAIT_S = 0.002


class Rank(Protocol):
    """What a mover drives: `ProducerRank` or `ConsumerRank`."""

    def step(self) -> bool: ...

    def take(self, body: Body) -> None: ...

    def post_ended(self, event: PostEnded) -> None: ...

    def stand_aside(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...


class Mover:
    """Owns `link`. Threads: its own after `start`, else the caller's."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        rank: ProducerRank | ConsumerRank,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._rank = rank
        self._wake = threading.Event()
        self._must_stop = False
        self._thread: threading.Thread | None = None
        self.has_failed = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvferry-transfer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something new. Any thread."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Stops the thread; waits for it at most this long. Idempotent. False if it is still in a
        call of the link's, which is nobody else's then."""
        self._must_stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def step(self) -> bool:
        """One round. True if anything moved."""
        events = self._link.poll()
        for event in events:
            if isinstance(event, Message):
                self._take(event)
            else:
                self._rank.post_ended(event)
        return self._rank.step() or bool(events)

    def _take(self, message: Message) -> None:
        try:
            body = unseal_message(self._settings.secret, self._link.name, message)
        except IncompatibleError:
            self._metrics.count("kvferry_transfer_messages_dropped_total", reason="foreign")
            return
        self._rank.take(body)

    def _run(self) -> None:
        while not self._must_stop:
            self._wake.clear()
            try:
                if not self.step():
                    self._wake.wait(IDLE_WAIT_S if self._rank.is_idle else BUSY_WAIT_S)
            # The job runner's edge: whatever a transport does, the engine serves on.
            except Exception as error:
                self._stand_aside(error)
                return

    def _stand_aside(self, error: Exception) -> None:
        """Every open record is settled: loads fail, leases run out."""
        self._metrics.count("kvferry_internal_errors_total", where="jobs")
        log.error("kvferry's transfer mover stands aside: %s", error, exc_info=error)
        self.has_failed = True
        while not self._rank.stand_aside() and not self._must_stop:
            self._clock.sleep(BUSY_WAIT_S)
