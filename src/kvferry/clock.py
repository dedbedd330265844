"""Time and chance as arguments: the only module that asks the machine for either.

Everything that waits, expires or mints takes a `Clock`. Tests and the simulated world pass one
that they move by hand (`kvferry.testing.clock`).
"""

import os
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time and chance. Any thread may call it."""

    def now_s(self) -> float:
        """Monotonic seconds. On one host the same for all processes; never goes back."""

    def wall_s(self) -> float:
        """Seconds since 1970, for people to read: never for a decision."""

    def random_bytes(self, count: int) -> bytes:
        """`count` bytes that nobody can guess (generations, ids)."""

    def sleep(self, duration_s: float) -> None:
        """Gives up the thread. Never called on a thread of vLLM's."""


class SystemClock:
    """The machine's own."""

    now_s = staticmethod(time.monotonic)  # one call less, in the hottest places

    def wall_s(self) -> float:
        return time.time()

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)
