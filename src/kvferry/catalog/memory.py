"""A catalog in the memory of one process: for tests, the simulated world and `memory:` stores.

One object is one catalog: those who share it each open it once and close it once. What it knows
outlives `close`, as a file would. Any thread may call. Time is the clock's. The rules are in
`memory_book`.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvferry.catalog.base import (
    DEFAULT_POLICY,
    GRACE_S,
    NO_TENANT,
    PACKED_HIT,
    CatalogStats,
    Commit,
    Hit,
    HotPage,
    Page,
    Policy,
    Quota,
    Refused,
    Share,
    Slot,
    Space,
    Swept,
    Verdict,
    Want,
    check_segment_bytes,
)
from kvferry.catalog.memory_book import MemoryBook
from kvferry.catalog.snapshot import SegmentEntry, Snapshot
from kvferry.clock import Clock
from kvferry.errors import ClosedError


class MemoryCatalog:
    """See the module and the contract."""

    def __init__(self, clock: Clock, grace_s: float = GRACE_S, policy: Policy = DEFAULT_POLICY):
        self.catalog_id = b""
        self._policy = policy
        self._clock = clock
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._open_count = 0
        self._store_id = b""
        self._book: MemoryBook | None = None

    def open(self, store_id: bytes, capacity_bytes: int, segment_bytes: int) -> bool:
        with self._lock:
            is_new = self._book is None or self._store_id != store_id
            if is_new:
                self.catalog_id = self._clock.random_bytes(16)
                self._store_id = store_id
                self._book = MemoryBook(self._clock, self._grace_s, segment_bytes, self._policy)
            check_segment_bytes(self._book.segment_bytes, segment_bytes)
            self._book.capacity_bytes = capacity_bytes
            self._open_count += 1
            return is_new

    def close(self) -> None:
        with self._lock:
            self._open_count = max(0, self._open_count - 1)

    @contextmanager
    def _use(self) -> Iterator[MemoryBook]:
        with self._lock:
            if self._open_count == 0:
                raise ClosedError("catalog.closed", "the catalog is closed")
            yield self._book

    def attach(self, space: Space) -> None:
        with self._use() as book:
            book.attach(space)

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Hit | None]:
        with self._use() as book:
            return book.lookup(namespace, keys)

    def lookup_packed(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        miss = bytes(PACKED_HIT.size)
        hits = self.lookup(namespace, keys)
        return b"".join(PACKED_HIT.pack(*h.address, h.generation) if h else miss for h in hits)

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        with self._use() as book:
            return book.present(namespace, keys)

    def reserve(
        self, namespace: bytes, count: int, lease_s: float, tenant: bytes = NO_TENANT
    ) -> list[Slot]:
        with self._use() as book:
            return book.reserve(Share(namespace, tenant), count, lease_s)

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        with self._use() as book:
            return book.commit(namespace, commits)

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        with self._use() as book:
            book.abort(namespace, slots)

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        with self._use() as book:
            book.touch(namespace, keys)

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        with self._use() as book:
            return book.evict(namespace, pages)

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        with self._use() as book:
            return book.sweep(wanted, can_grow)

    def grow(self, namespace: bytes, tenant: bytes = NO_TENANT) -> int | Refused:
        with self._use() as book:
            return book.grow(Share(namespace, tenant))

    def grown(self, segment: int) -> bool:
        with self._use() as book:
            return book.grown(segment)

    def shrunk(self, segment: int) -> None:
        with self._use() as book:
            book.shrunk(segment)

    def adopt(
        self, segment: int, namespace: bytes, pages: Sequence[Page], tenant: bytes = NO_TENANT
    ) -> int:
        with self._use() as book:
            return book.adopt(segment, Share(namespace, tenant), pages)

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        with self._use() as book:
            book.set_quotas(quotas)

    def stats(self) -> CatalogStats:
        with self._use() as book:
            return book.stats()

    def hottest(self, namespace: bytes, count: int) -> list[HotPage]:
        with self._use() as book:
            return book.hottest(namespace, count)

    def segments(self) -> dict[int, SegmentEntry]:
        with self._use() as book:
            return book.segments()

    def snapshot(self) -> Snapshot:
        with self._use() as book:
            return book.snapshot()
