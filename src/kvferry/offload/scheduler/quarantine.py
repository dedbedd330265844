"""Keys whose page could not be loaded lately: neither offered nor believed to be there.

Without it a request whose page is bad is offered the same page again, for ever. One thread: the
scheduler's.
"""

from collections.abc import Mapping

from kvferry.clock import Clock


class Quarantine:
    """`version` grows with each key, so that an answer is looked through once for each change."""

    def __init__(self, clock: Clock, ttl_s: float):
        self._clock = clock
        self._ttl_s = ttl_s
        self._until_s: dict[bytes, float] = {}  # in the order in which they end
        self.version = 0

    def __contains__(self, key: bytes) -> bool:
        return self._until_s.get(key, 0.0) > self._clock.now_s()

    def among(self, by_key: Mapping[bytes, int]) -> list[int]:
        """The values of those keys that are in quarantine."""
        return [by_key[key] for key in self._until_s.keys() & by_key.keys() if key in self]

    def add(self, key: bytes) -> None:
        now_s = self._clock.now_s()
        while self._until_s and (oldest := next(iter(self._until_s))) not in self:
            del self._until_s[oldest]
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + self._ttl_s
        self.version += 1
