"""The one background thread of a process half: it makes the calls that may take long or fail.

Life of a ticket:

1. `submit` makes it and never waits. REFUSED at once if the runner is closed, its queue is full or
   the breaker is open.
2. PENDING until the work is done or the deadline has passed, whichever comes first: a task that
   hangs makes its own ticket LATE and those behind it, but nobody waits.
3. DONE with a value or FAILED with an error. A value that comes after the deadline goes to
   `on_orphan` instead, so that what was reserved too late can be given back.

The breaker opens after `failures_max` failures in a row (UnavailableError, OSError, lateness, our
own bugs), or while the running task is overdue; waiting too long in the queue is no failure. After
a backoff with jitter the next task is the probe: its success closes the breaker, its failure
doubles the backoff. Periodic work probes too, so it closes without requests. Other errors are
answers: a full catalog is not a dead one.

In tests nobody calls `start`: `step` runs one piece of work on the caller's thread.
"""

import logging
import threading
from collections.abc import Callable
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from kvferry.clock import Clock
from kvferry.errors import Error, InternalError, UnavailableError
from kvferry.metrics import Metrics

T = TypeVar("T")

log = logging.getLogger(__name__)


class TicketState(Enum):
    """See the module."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    LATE = "late"
    REFUSED = "refused"


class Ticket(Generic[T]):
    """One submitted piece of work. Any thread may ask; it settles exactly once.

    `value`: the result, when DONE. `error`: the reason, when FAILED.
    """

    def __init__(
        self,
        work: Callable[[], T],
        deadline_s: float,
        on_orphan: Callable[[T], None] | None = None,
    ):
        """`deadline_s`: a moment of the clock."""
        self.work = work
        self.deadline_s = deadline_s
        self.on_orphan = on_orphan
        self.value: T | None = None
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._state = TicketState.PENDING

    def state(self, now_s: float) -> TicketState:
        """Never waits."""
        with self._lock:
            if self._state is TicketState.PENDING and now_s >= self.deadline_s:
                self._state = TicketState.LATE
            return self._state

    def abandon(self, now_s: float) -> T | None:
        """Nobody waits for it any more. The value if there is one already; one that comes later
        goes to `on_orphan`. Work that has not begun is not done."""
        return None if self.settle(TicketState.REFUSED, now_s) else self.value

    def settle(self, state: TicketState, now_s: float) -> bool:
        """False if it is late, or was settled before."""
        with self._lock:
            if self._state is not TicketState.PENDING:
                return False
            is_late = now_s >= self.deadline_s and state is not TicketState.REFUSED
            self._state = TicketState.LATE if is_late else state
            return not is_late


class _Breaker:
    """Counts failures in a row and says whether work is worth trying. The runner's lock guards."""

    def __init__(
        self, clock: Clock, metrics: Metrics, failures_max: int, backoff_s: float, *, max_s: float
    ):
        self._clock = clock
        self._metrics = metrics
        self._failures_max = failures_max
        self._first_backoff_s = backoff_s
        self._backoff_max_s = max_s
        self._backoff_s = backoff_s
        self._failure_count = 0
        self._retry_at_s: float | None = None

    @property
    def is_closed(self) -> bool:
        return self._retry_at_s is None

    def refuses(self, now_s: float) -> bool:
        """True while open; False when closed or when it is time for a probe."""
        return self._retry_at_s is not None and now_s < self._retry_at_s

    def succeed(self) -> None:
        if not self.is_closed:
            log.warning("the catalog answers again")
        self._failure_count = 0
        self._retry_at_s = None
        self._backoff_s = self._first_backoff_s
        self._metrics.set("kvferry_breaker_open", 0)

    def fail(self, now_s: float, error: Exception | None) -> None:
        """`error` None: it was late."""
        self._failure_count += 1
        if self._failure_count >= self._failures_max or not self.is_closed:
            self.open(now_s, error)

    def open(self, now_s: float, error: Exception | None = None) -> None:
        """Opens, or opens again after a probe that failed."""
        if self.refuses(now_s):
            return
        if self.is_closed:
            log.warning("no cache until the catalog answers: %s", error or "a call is late")
            self._metrics.set("kvferry_breaker_open", 1)
            self._metrics.count("kvferry_breaker_openings_total")
        chance = int.from_bytes(self._clock.random_bytes(2), "big") / 65536
        self._retry_at_s = now_s + self._backoff_s * (0.5 + chance / 2)
        self._backoff_s = min(self._backoff_s * 2, self._backoff_max_s)


class _Periodic:
    """Work that comes back."""

    def __init__(self, work: Callable[[], Any], interval_s: float, due_s: float):
        self.work = work
        self.interval_s = interval_s
        self.due_s = due_s


class Runner:
    """See the module. `start` makes the thread; `close` is idempotent. Any thread may submit.

    `last_error`: the latest error that was our own bug (any exception that a task may not raise).
    """

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics | None = None,
        *,
        queue_max: int = 1024,
        failures_max: int = 3,
        backoff_s: float = 1.0,
        backoff_max_s: float = 30.0,
    ):
        self.last_error: InternalError | None = None
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._queue_max = queue_max
        self._breaker = _Breaker(clock, self._metrics, failures_max, backoff_s, max_s=backoff_max_s)
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()  # None: look around
        self._periodics: list[_Periodic] = []
        self._running: Ticket | None = None
        self._is_closed = False
        self._is_abandoned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. A daemon: a task that hangs does not keep the process alive."""
        self._thread = threading.Thread(target=self._loop, name="kvferry-runner", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Takes nothing new, finishes what is queued for at most `timeout_s`, refuses the rest."""
        with self._lock:
            self._is_closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            end_s = self._clock.now_s() + timeout_s
            while self._clock.now_s() < end_s and self.step():
                pass
        self._is_abandoned = True
        while not self._queue.empty():
            ticket = self._next(0)
            if ticket is not None:
                ticket.settle(TicketState.REFUSED, self._clock.now_s())

    def submit(
        self,
        work: Callable[[], T],
        deadline_s: float,
        on_orphan: Callable[[T], None] | None = None,
    ) -> Ticket[T]:
        """Queues `work` to be done within `deadline_s` seconds. Never waits, never raises.
        `on_orphan` gets, on the runner's thread, a value that came too late."""
        now_s = self._clock.now_s()
        ticket = Ticket(work, now_s + deadline_s, on_orphan)
        with self._lock:
            queued_count = self._queue.qsize()
            if self._is_closed or queued_count >= self._queue_max or self._refuses(now_s):
                ticket.settle(TicketState.REFUSED, now_s)
            else:
                self._queue.put(ticket)
        if queued_count:
            self._metrics.set("kvferry_catalog_calls_pending", queued_count)
        return ticket

    def periodic(self, work: Callable[[], Any], interval_s: float) -> None:
        """Does `work` every `interval_s`, the first time after that long; taking longer than
        `interval_s` is late."""
        due_s = self._clock.now_s() + interval_s
        with self._lock:
            self._periodics.append(_Periodic(work, interval_s, due_s))
        self._queue.put(None)

    def is_available(self) -> bool:
        """False while the breaker is open: work would be refused."""
        with self._lock:
            return not self._refuses(self._clock.now_s())

    def _refuses(self, now_s: float) -> bool:
        running = self._running
        if running is not None and now_s >= running.deadline_s:
            if self._breaker.is_closed:
                self._breaker.open(now_s)
            return True
        is_probing = not self._breaker.is_closed and (
            running is not None or not self._queue.empty()
        )
        return is_probing or self._breaker.refuses(now_s)

    # The runner's thread.

    def _loop(self) -> None:
        while not self._is_abandoned:
            if not self._serve(self._idle_s()) and self._is_closed:
                return

    def _idle_s(self) -> float | None:
        """How long there is nothing to do; None: until woken."""
        if self._is_closed:
            return 0
        now_s = self._clock.now_s()
        delays_s = [max(0, periodic.due_s - now_s) for periodic in self._periodics]
        return min(delays_s, default=None)

    def step(self) -> bool:
        """Runs one piece of work that is due. False if there is none."""
        return self._serve(0)

    def _serve(self, timeout_s: float | None) -> bool:
        """Runs the next piece of work; waits for it at most so long. False if there is none."""
        ticket = self._due_periodic(self._clock.now_s()) or self._next(timeout_s)
        if ticket is None:
            return not self._queue.empty()
        now_s = self._clock.now_s()
        self._metrics.set("kvferry_catalog_calls_pending", self._queue.qsize())
        with self._lock:
            is_refused = self._breaker.refuses(now_s)
        if is_refused:
            ticket.error = UnavailableError("runner.breaker", "the catalog does not answer")
            ticket.settle(TicketState.FAILED, now_s)
        elif ticket.state(now_s) is TicketState.PENDING:
            self._run(ticket)
        return True

    def _next(self, timeout_s: float | None) -> Ticket | None:
        try:
            return self._queue.get(timeout_s != 0, timeout_s)
        except Empty:
            return None

    def _due_periodic(self, now_s: float) -> Ticket | None:
        for periodic in () if self._is_closed else self._periodics:
            if periodic.due_s <= now_s:
                periodic.due_s = now_s + periodic.interval_s
                return Ticket(periodic.work, periodic.due_s)
        return None

    def _run(self, ticket: Ticket) -> None:
        with self._lock:
            self._running = ticket
        ticket.value, ticket.error = value, error = self._attempt(ticket.work)
        state = TicketState.FAILED if error else TicketState.DONE
        in_time = ticket.settle(state, self._clock.now_s())
        if not in_time:
            ticket.value = None
            if error is None and ticket.on_orphan is not None:
                self._attempt(lambda: ticket.on_orphan(value))
        with self._lock:
            self._running = None
            now_s = self._clock.now_s()
            is_late = ticket.state(now_s) is TicketState.LATE
            if is_late or isinstance(error, OSError | InternalError):
                self._breaker.fail(now_s, error)
            else:
                self._breaker.succeed()

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return work(), None
        except InternalError as error:
            return None, self._note(error)
        except (Error, OSError) as error:
            return None, error
        except Exception as error:  # the job runner's edge: a bug in a task must not end the thread
            bug = InternalError("runner.task", f"a task raised {error!r}")
            bug.__cause__ = error
            return None, self._note(bug)

    def _note(self, error: InternalError) -> InternalError:
        self.last_error = error
        self._metrics.count("kvferry_internal_errors_total", where="runner")
        return error
