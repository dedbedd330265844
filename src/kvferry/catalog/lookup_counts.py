"""Lookups that a process has made and not yet told its catalog of: they go with its next write."""

import threading
from collections.abc import Mapping
from dataclasses import replace

from kvferry.catalog.base import CatalogStats, counted

Counts = Mapping[bytes, tuple[int, int]]
"""By namespace: keys looked up, and those of them that were found."""


class LookupCounts:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[bytes, tuple[int, int]] = {}

    def add(self, namespace: bytes, lookup_count: int, hit_count: int) -> None:
        with self._lock:
            lookups, hits = self._counts.get(namespace, (0, 0))
            self._counts[namespace] = lookups + lookup_count, hits + hit_count

    def pending(self) -> Counts:
        """A copy."""
        with self._lock:
            return dict(self._counts)

    def told(self, counts: Counts) -> None:
        """The catalog has these now."""
        with self._lock:
            for namespace, (lookup_count, hit_count) in counts.items():
                lookups, hits = self._counts[namespace]
                rest = lookups - lookup_count, hits - hit_count
                if any(rest):
                    self._counts[namespace] = rest
                else:
                    del self._counts[namespace]

    def added_to(self, stats: CatalogStats) -> CatalogStats:
        """What a catalog says, as if it had been told."""
        counts = self.pending()
        lookups, hits = sums(counts)
        return replace(
            stats,
            spaces=tuple(counted(space, counts) for space in stats.spaces),
            lookup_key_count=stats.lookup_key_count + lookups,
            hit_key_count=stats.hit_key_count + hits,
        )


def sums(counts: Counts) -> tuple[int, int]:
    """Of all namespaces."""
    return sum(lookups for lookups, _ in counts.values()), sum(hits for _, hits in counts.values())
