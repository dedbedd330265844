"""Looks at something again and again on a thread of its own, so that whoever asks never waits."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.clock import Clock
from kvferry.errors import Error

T = TypeVar("T")

MISSED_MAX = 3
"""Looks that may be missed before what was seen last no longer counts."""
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Sample(Generic[T]):
    """`value`: what was seen last, None if nothing ever was; `taken_s`: when, by the clock.
    `error`: why it is not so now, None if it is."""

    value: T | None
    taken_s: float | None
    error: str | None

    @property
    def is_up(self) -> bool:
        return self.error is None


class Sampler(Generic[T]):
    """`take`: looks, on the sampler's own thread; may take long or raise Error or OSError. `tell`:
    told on that thread what is wrong, when that changes; None: nothing any more.
    Life: `start`, `latest` from any thread, `close`: a look that hangs keeps nobody."""

    def __init__(
        self,
        take: Callable[[], T],
        interval_s: float,
        clock: Clock,
        tell: Callable[[str | None], None] = lambda error: None,
    ):
        self._take = take
        self._tell = tell
        self._interval_s = interval_s
        self._clock = clock
        self._latest: Sample[T] = Sample(None, None, None)
        self._started_s = 0.0
        self._stop = threading.Event()

    def start(self) -> None:
        self._started_s = self._clock.now_s()
        threading.Thread(target=self._loop, name="kvferry-view", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def latest(self) -> Sample[T]:
        """Never waits."""
        sample, now_s = self._latest, self._clock.now_s()
        since_s = self._started_s if sample.taken_s is None else sample.taken_s
        silent_s = now_s - since_s
        if sample.error is None and silent_s > MISSED_MAX * self._interval_s + PATIENCE_S:
            return Sample(sample.value, sample.taken_s, f"no answer for {silent_s:.0f} s")
        if sample.error is None and sample.taken_s is None:
            return Sample(None, None, "not looked at yet")
        return sample

    def age_s(self, sample: Sample[T]) -> float | None:
        return None if sample.taken_s is None else self._clock.now_s() - sample.taken_s

    def _loop(self) -> None:
        while not self._stop.is_set():
            before, self._latest = self._latest, self._look()
            if self._latest.error != before.error:
                self._tell(self._latest.error)
            self._stop.wait(self._interval_s)

    def _look(self) -> Sample[T]:
        try:
            return Sample(self._take(), self._clock.now_s(), None)
        except Error as error:
            reason = error.message
        except OSError as error:
            reason = error.strerror or str(error)
        return Sample(self._latest.value, self._latest.taken_s, reason)
