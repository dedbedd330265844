"""Contract of a catalog: a hint that says where pages are, and the accounting of slots.

What it says may be stale or lost: that costs hits, never correctness, since every page proves
itself. What it must never do is give one slot to two owners at a time. The life of a slot:

1. FREE in a segment of the namespace that its page will be of.
2. RESERVED by `reserve`, with a fresh generation, for a lease. Nobody can find it.
3. COMMITTED piece by piece: each rank commits the slices that it has written. When all slices of
   the generation are in, the page becomes visible: PUBLISHED. If the key has a page by then, the
   newcomer has lost: its slot is freed (at once if all its slices are committed, else when its
   lease ends, since another rank may still be writing to it).
4. A lease that ends frees what it held after a further grace time.
5. EVICTED: unfindable at once, FREE again after the grace time. A reader that is slower than that
   reads another generation: a miss.

Space moves between namespaces by whole segments. `grow` adds one within the capacity budget
(CREATING until `grown`); an emptied segment is handed out by `sweep` for deletion after the grace
time and leaves the budget only when `shrunk` says that its file is gone.

Recency: `touch` and `lookup` are calls with a chain of keys, the first one being the start of the
prefix; a page is never younger than its parent (see `touch`). So "coldest first, at equal age the
greatest chunk index first" evicts leaves before what they hang on.

Time is the catalog's own and monotonic, also over a restart and a reboot. Leases are durations.
Every call is atomic, idempotent where it says so, bounded in work, and may come from any thread
or process; a call may take long or raise UnavailableError, so only a runner thread calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from kvferry.layout import Address


class Hit(NamedTuple):
    """A page that was published when the catalog looked."""

    address: Address
    generation: bytes


class Slot(NamedTuple):
    """A reserved slot. The generation is minted by the catalog, 16 random bytes."""

    address: Address
    generation: bytes


@dataclass(frozen=True, slots=True)
class Space:
    """What the catalog knows of a namespace. Equal in every call for the same namespace."""

    namespace: bytes  # 32
    slot_count: int  # slots in one segment
    slot_bytes: int
    slice_count: int  # slices in one page
    chunk_tokens: int
    description: str  # JSON of the identity record, for people


class Commit(NamedTuple):
    """One rank's word that the slices [first_slice, first_slice + slice_count) are on storage."""

    key: bytes
    parent: bytes
    chunk_index: int
    slot: Slot
    first_slice: int
    slice_count: int


class Verdict(Enum):
    """What a commit did."""

    PUBLISHED = "published"
    PARTIAL = "partial"  # other slices are missing
    DUPLICATE = "duplicate"  # the key has a page of another generation
    EXPIRED = "expired"  # the reservation is gone: lease over, aborted, or catalog lost


class Page(NamedTuple):
    """A published page, as `evict` and `adopt` name it."""

    key: bytes
    parent: bytes
    chunk_index: int
    address: Address
    generation: bytes


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and did. The caller deletes the segments and says `shrunk` of each."""

    expired_count: int
    evicted_count: int
    deletable_segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """One namespace's figures."""

    namespace: bytes
    description: str
    page_count: int
    reserved_count: int
    graced_count: int
    segment_count: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """All figures at one moment. Counters count since the catalog was created."""

    capacity_bytes: int
    segment_bytes: int
    segment_count: int  # all states, CREATING and emptied ones included
    spaces: tuple[SpaceStats, ...]
    lookup_key_count: int
    hit_key_count: int
    published_count: int
    duplicate_count: int
    expired_count: int
    evicted_count: int


class Catalog(Protocol):
    """See the module. Constructors only store; `open` acquires; `close` is idempotent."""

    def open(self, store_id: bytes, capacity_bytes: int, segment_bytes: int) -> bool:
        """Opens or creates the catalog of one store. Returns True if it is new (or was made for
        another store, whose records are dropped): whoever opened it adopts what the pages say
        before anybody reserves. Raises ConfigError or UnavailableError."""

    def close(self) -> None: ...

    def attach(self, space: Space) -> None:
        """Makes a namespace known. Idempotent; IncompatibleError if it is known otherwise."""

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Hit | None]:
        """One answer per key. Changes nothing but counters."""

    def reserve(self, namespace: bytes, count: int, lease_s: float) -> list[Slot]:
        """Up to `count` slots; fewer where free slots are fewer. Never grows, never evicts."""

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        """Idempotent: the same commit again gets the same verdict."""

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        """Gives unused or half-written slots back: reusable after the grace time. Idempotent; a
        slot of another generation, or published, is left alone."""

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Marks a chain, start of the prefix first, as used now. Ages are kept at a granularity
        of a minute: with t = now if the first present key is older than that, else its age, each
        present key becomes at least as young as t."""

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        """Evicts these pages, named by (key, generation); others of the key stay. Returns how
        many were there."""

    def sweep(self, wanted: Sequence[tuple[bytes, int]] = ()) -> Swept:
        """Ends leases and grace times, then makes room: `wanted` says for which namespaces how
        many slots should become free. Where FREE, graced and growable slots do not reach that,
        it evicts: the coldest page of all namespaces decides; if it is of the wanting namespace,
        pages are evicted one by one, else the coldest segment of its namespace is emptied."""

    def grow(self, namespace: bytes) -> int | None:
        """The number of a new segment in state CREATING, or None if the budget is used up. One
        that is not `grown` within 60 s is handed out for deletion by `sweep`."""

    def grown(self, segment: int) -> None:
        """The segment's file is there: its slots are FREE. Idempotent."""

    def shrunk(self, segment: int) -> None:
        """The segment's file is gone: its bytes leave the budget. Idempotent."""

    def adopt(self, segment: int, namespace: bytes, pages: Sequence[Page]) -> int:
        """Takes over a segment found on the store, with the pages found in it, after `attach` of
        its namespace; pages whose key is known are dropped. Returns how many were taken. Raises
        ExhaustedError if the budget does not hold the segment."""

    def stats(self) -> CatalogStats: ...
