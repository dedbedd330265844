"""Time and chance under a test's control."""

import random

Chance = random.Random
"""Seeded decisions of a test, as an argument."""


class ManualClock:
    """A `Clock` that stands still until it is moved; `sleep` moves it. Equal seeds give equal
    bytes. `chance` is for tests' own decisions: what they draw does not change what is minted."""

    def __init__(self, seed: int = 0, start_s: float = 1000.0):
        self.chance = Chance(f"chance {seed}")
        self._minted = Chance(f"minted {seed}")
        self._now_s = start_s
        self._wall_offset_s = 1.7e9

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def random_bytes(self, count: int) -> bytes:
        return self._minted.randbytes(count)

    def sleep(self, duration_s: float) -> None:
        self.advance(duration_s)

    def advance(self, duration_s: float) -> None:
        """Moves time on."""
        assert duration_s >= 0
        self._now_s += duration_s
