"""How a checker says that something does not hold, and the clock that catches who waits.

(a) a load gives what the key means, or a miss; no page with a valid key holds anything else
(b) the catalog's records do not contradict each other: a slot has one owner
(c) at rest nothing is left but the reservation pool; every block is freed once
(d) once faults stop, everything ends within a bounded number of steps
(e) nothing that the engine's scheduler calls waits, or does the background's work
(f) nobody is pushed below what it is guaranteed
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.testing.clock import ManualClock


class Failed(AssertionError):
    """One of these does not hold. `checker`: which."""

    def __init__(self, checker: str, message: str):
        super().__init__(f"({checker}) {message}")
        self.checker = checker


class SimClock(ManualClock):
    """Knows whether the engine's scheduler is running."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self._is_scheduling = False

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Around all that an engine's scheduler does."""
        assert not self._is_scheduling
        self._is_scheduling = True
        try:
            yield
        finally:
            self._is_scheduling = False

    def require_background(self, what: str) -> None:
        if self._is_scheduling:
            raise Failed("e", f"{what} inside a call of the scheduler's")

    def sleep(self, duration_s: float) -> None:
        self.require_background("sleep")
        super().sleep(duration_s)
