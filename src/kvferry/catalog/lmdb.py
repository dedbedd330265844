"""The embedded catalog: LMDB, for several processes of one host, without a server.

Each call is one transaction. The folder lies on a local disk, never on the shared file system. What
may be lost is said in `lmdb_environment`: after a crash of the system (not of a process) the
catalog starts empty. Counters of lookups are kept in the process and written with its next write.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvferry.catalog import lmdb_environment
from kvferry.catalog.base import (
    DEFAULT_POLICY,
    GRACE_S,
    HOTTEST_MAX,
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
from kvferry.catalog.lmdb_audit import Audit
from kvferry.catalog.lmdb_book import LmdbBook
from kvferry.catalog.lmdb_environment import Environment, Tables, boot_id
from kvferry.catalog.lmdb_records import META_KEY, Meta
from kvferry.catalog.lookup_counts import LookupCounts
from kvferry.catalog.snapshot import SegmentEntry, Snapshot
from kvferry.clock import Clock
from kvferry.errors import ClosedError, ConfigError
from kvferry.layout import Address

T = TypeVar("T")

NO_GENERATION = bytes(16)
MISS = bytes(PACKED_HIT.size)


class _Opening(NamedTuple):
    """What `open` was told, and whether others have the catalog open."""

    store_id: bytes
    capacity_bytes: int
    segment_bytes: int
    is_shared: bool


class LmdbCatalog:
    """See the module and the contract. `folder`: made if it is not there; one for each store.
    `is_guest`: opens only what is this store's already, and never starts anew."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        grace_s: float = GRACE_S,
        map_bytes: int = lmdb_environment.MAP_BYTES,
        *,
        is_guest: bool = False,
        policy: Policy = DEFAULT_POLICY,
    ):
        self.catalog_id = b""
        self._folder = folder
        self._clock = clock
        self._grace_s = grace_s
        self._map_bytes = map_bytes
        self._environment: Environment | None = None
        self._counts = LookupCounts()
        self._is_guest = is_guest
        self._policy = policy

    def open(self, store_id: bytes, capacity_bytes: int, segment_bytes: int) -> bool:
        if self._environment is not None:
            self.close()
        environment = lmdb_environment.acquire(self._folder, self._clock, self._map_bytes)
        try:
            is_shared = environment.is_shared()
            opening = _Opening(store_id, capacity_bytes, segment_bytes, is_shared)
            meta, is_new = environment.write(lambda tables: self._settle(tables, opening))
        except BaseException:
            lmdb_environment.release(environment)
            raise
        self.catalog_id = meta.catalog_id
        self._environment = environment
        return is_new

    def _settle(self, tables: Tables, opening: _Opening) -> tuple[Meta, bool]:
        """Makes the catalog one of this store. Returns what it is now, and whether it is new."""
        packed = tables.meta.get(META_KEY)
        known = packed and Meta.unpack(packed)
        is_new = not known or known.store_id != opening.store_id
        if is_new and (self._is_guest or (packed and opening.is_shared)):
            raise ConfigError(
                "catalog.store",
                "the catalog is that of another store, or of another version of kvferry: name"
                " another folder",
                folder=str(self._folder),
            )
        if is_new:
            tables.clear()
            meta = self._new_meta(opening)
        else:
            check_segment_bytes(known.segment_bytes, opening.segment_bytes)
            meta = self._renewed(known, opening)
        tables.meta.put(META_KEY, meta.pack())
        return meta, is_new

    def _new_meta(self, opening: _Opening) -> Meta:
        return Meta(
            catalog_id=self._clock.random_bytes(16),
            store_id=opening.store_id,
            capacity_bytes=opening.capacity_bytes,
            segment_bytes=opening.segment_bytes,
            boot_id=boot_id(),
            offset_s=0.0,
            last_s=0.0,
        )

    def _renewed(self, known: Meta, opening: _Opening) -> Meta:
        now_s, boot = self._clock.now_s(), boot_id()
        offset_s = known.offset_s
        if known.boot_id != boot or now_s + offset_s < known.last_s:
            offset_s = known.last_s - now_s  # the host's time began again: go on where it stopped
        return known._replace(
            capacity_bytes=opening.capacity_bytes, boot_id=boot, offset_s=offset_s
        )

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            lmdb_environment.release(environment)

    # Transactions.

    def _opened(self) -> Environment:
        if self._environment is None:
            raise ClosedError("catalog.closed", "the catalog is closed", folder=str(self._folder))
        return self._environment

    def _write(self, verb: Callable[[LmdbBook], T]) -> T:
        counts = self._counts.pending()

        def work(tables: Tables) -> T:
            book = self._book(tables)
            book.count_lookups(counts)
            result = verb(book)
            book.flush()
            return result

        result = self._opened().write(work)
        self._counts.told(counts)
        return result

    def _read(self, verb: Callable[[LmdbBook], T]) -> T:
        return self._opened().read(lambda tables: verb(self._book(tables)))

    def _book(self, tables: Tables) -> LmdbBook:
        clock = self._clock
        return LmdbBook(tables, clock.now_s(), self._grace_s, clock.random_bytes, self._policy)

    # Verbs.

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Hit | None]:
        return [
            None if generation == NO_GENERATION else Hit(Address(segment, slot), generation)
            for segment, slot, generation in PACKED_HIT.iter_unpack(
                self.lookup_packed(namespace, keys)
            )
        ]

    def lookup_packed(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        hits = self._read(lambda book: book.lookup(namespace, keys))
        self._counts.add(namespace, len(keys), len(keys) - hits.count(MISS))
        return b"".join(hits)

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return [hit != MISS for hit in self._read(lambda book: book.lookup(namespace, keys))]

    def attach(self, space: Space) -> None:
        if not self._read(lambda book: book.is_attached(space)):
            self._write(lambda book: book.attach(space))

    def reserve(
        self, namespace: bytes, count: int, lease_s: float, tenant: bytes = NO_TENANT
    ) -> list[Slot]:
        return self._write(lambda book: book.reserve(Share(namespace, tenant), count, lease_s))

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        return self._write(lambda book: book.commit(namespace, commits))

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        self._write(lambda book: book.abort(namespace, slots))

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        stale = self._read(lambda book: book.stale(namespace, keys))
        if stale:
            self._write(lambda book: book.touch(namespace, stale))

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        return self._write(lambda book: book.evict(namespace, pages))

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        self._opened().clean_readers()
        return self._write(lambda book: book.sweep(wanted, can_grow))

    def grow(self, namespace: bytes, tenant: bytes = NO_TENANT) -> int | Refused:
        return self._write(lambda book: book.grow(Share(namespace, tenant)))

    def grown(self, segment: int) -> bool:
        return self._write(lambda book: book.grown(segment))

    def shrunk(self, segment: int) -> None:
        self._write(lambda book: book.shrunk(segment))

    def adopt(
        self, segment: int, namespace: bytes, pages: Sequence[Page], tenant: bytes = NO_TENANT
    ) -> int:
        return self._write(lambda book: book.adopt(segment, Share(namespace, tenant), pages))

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        self._write(lambda book: book.set_quotas(quotas))

    def stats(self) -> CatalogStats:
        return self._counts.added_to(self._read(LmdbBook.stats))

    def hottest(self, namespace: bytes, count: int) -> list[HotPage]:
        return self._read(lambda book: book.hottest(namespace, min(count, HOTTEST_MAX)))

    def segments(self) -> dict[int, SegmentEntry]:
        return {heat.number: heat.entry for heat in self._read(LmdbBook.heats)}

    def snapshot(self) -> Snapshot:
        return self._opened().read(Audit).snapshot()
