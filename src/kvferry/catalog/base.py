"""Contract of a catalog: a hint that says where pages are, and the accounting of slots.

What it says may be stale or lost: that costs hits, never correctness. What it must never do is give
one slot to two owners at a time. The life of a slot:

1. FREE in a segment of the namespace that its page will be of.
2. RESERVED by `reserve`, with a fresh generation, for a lease. Nobody can find it.
3. COMMITTED slice by slice, by each rank; with the last one of the generation PUBLISHED: it can be
   found. If the key has a page by then, the newcomer's slot is freed (at once if all its slices are
   committed, else when its lease ends, since another rank may still be writing to it).
4. A lease that ends frees what it held after a further grace time.
5. EVICTED: unfindable at once, FREE again after the grace time. A reader that is slower than that
   reads another generation: a miss.

Space moves by whole segments, each of one `Share`, a tenant's part of a namespace. `grow` adds one
within the budget (CREATING until `grown`); `sweep` hands an emptied one out for deletion after
the grace time, and it leaves the budget when `shrunk` says that its file is gone. A page is of the
share whose slot it is in; lookups do not ask whose. What may be had: `quotas`.

Recency: the age of a page is the step (10 s) of its last use. What makes a page younger makes its
ancestors at least as young, so "coldest first, at equal age the greatest chunk index first" evicts
leaves before what they hang on. Unless the policy is `lru`, uses count too (`eviction`).

A namespace that the catalog does not know (it was lost since `attach`, or had no segment for a day)
has no pages; verbs that need its `Space` (reserve, grow, adopt) raise UnavailableError with kind
`catalog.unknown_namespace`: attach it again.

Time is the catalog's own and monotonic, also over a restart and a reboot. Leases are durations.
Every call is atomic, idempotent where it says so, bounded in work, and may come from any thread
or process; a call may take long or raise UnavailableError, so only a runner thread calls it.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

from kvferry.catalog.snapshot import SegmentEntry, Snapshot
from kvferry.errors import ConfigError, IncompatibleError, InternalError, UnavailableError
from kvferry.layout import Address

GRACE_S = 10.0
"""For how long an evicted or given-up slot is not used again."""
CREATION_S = 60.0
"""For how long a new segment may be CREATING, and then idle before another namespace takes it."""
AGE_STEP_S = 10.0
"""Granularity of ages."""
USES_MAX = 15
"""Uses of a page are counted up to here."""
CLASS_COUNT = 4
"""Used once, twice, 4 times, 8 times or more."""
SPACE_IDLE_S = 86_400.0
"""After this time without a segment a namespace is forgotten."""
ATTACH_STEP_S = 3600.0
"""Granularity of the moment of the last `attach`."""
HOTTEST_MAX = 1024
"""Pages that `hottest` names at most."""
LOST = "catalog.lost"
"""Kind of the UnavailableError of a catalog that must be opened again: it may know less than it
did, or nothing."""


PACKED_HIT = struct.Struct("<II16s")
"""Segment, slot, generation: a `Hit` in `lookup_packed`. All zeros: a miss."""


class Policy(Enum):
    """Which page of a namespace goes first: `eviction` says how. All who share a catalog name the
    same; the records are the same for all."""

    LRU = "lru"
    ADAPTIVE = "adaptive"


DEFAULT_POLICY = Policy.ADAPTIVE


NO_TENANT = bytes(16)
NO_MAXIMUM = 2**32 - 1
EVERYBODY = b"*"
"""Owner of a quota that only has a `ttl_s`."""
LAPSED_MAX = 1024
"""Pages that one sweep evicts at most since their time to live is over."""


class Share(NamedTuple):
    """What one tenant has of one namespace: whole segments. `tenant`: as `keys.tenant_id` says."""

    namespace: bytes
    tenant: bytes = NO_TENANT


class Want(NamedTuple):
    """For a `sweep`: so many slots should become free in a share."""

    namespace: bytes
    count: int
    tenant: bytes = NO_TENANT


class Quota(NamedTuple):
    """What a tenant (16 bytes) or a namespace (32 bytes) gets, in segments: at least
    `guaranteed_count` if it wants them, never more than `maximum_count`. `ttl_s`: sweeps evict its
    pages that were not used for so long; 0: they do not."""

    owner: bytes
    guaranteed_count: int = 0
    maximum_count: int = NO_MAXIMUM
    ttl_s: float = 0.0


class Refused(Enum):
    """Why `grow` gave no segment."""

    BUDGET = "budget"  # the capacity is used up
    QUOTA = "quota"  # the maximum is reached, or the rest is another's guarantee


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


class HotPage(NamedTuple):
    """A published page as `hottest` shows it. `idle_minutes`: since its last use, rounded up."""

    key: bytes
    parent: bytes
    chunk_index: int
    idle_minutes: int


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and did. The caller deletes the segments and says `shrunk` of each.
    `quota_evicted_count`: of the evicted, those that the budget alone would have kept or taken from
    another; `lapsed_count`: those whose time to live was over."""

    expired_count: int
    evicted_count: int
    deletable_segments: tuple[int, ...]
    quota_evicted_count: int = 0
    lapsed_count: int = 0


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """One namespace's figures. Counters count since the namespace was made known."""

    namespace: bytes
    description: str
    page_count: int
    reserved_count: int
    graced_count: int
    segment_count: int
    slot_bytes: int
    chunk_tokens: int
    lookup_key_count: int = 0
    hit_key_count: int = 0


@dataclass(frozen=True, slots=True)
class ShareStats:
    """What a share has now; shares without a segment are not told."""

    share: Share
    segment_count: int
    page_count: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """All figures at one moment. Counters count since the catalog was created. `shares` in order;
    `quota_refused_count`: of `grow`; `quota_evicted_count`, `lapsed_count`: see `Swept`."""

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
    shares: tuple[ShareStats, ...] = ()
    quota_refused_count: int = 0
    quota_evicted_count: int = 0
    lapsed_count: int = 0


class Catalog(Protocol):
    """See the module. Constructors only store; `open` acquires; `close` is idempotent.

    `catalog_id`: 16 random bytes that name this set of records, from `open` on.
    """

    catalog_id: bytes

    def open(self, store_id: bytes, capacity_bytes: int, segment_bytes: int) -> bool:
        """Opens or creates the catalog of one store. Returns True if it is new (or was made for
        another store, whose records are dropped): whoever opened it adopts what the pages say
        before anybody reserves. Another capacity than before replaces it: the next sweeps empty
        what is too much. Raises ConfigError or UnavailableError."""

    def close(self) -> None: ...

    def attach(self, space: Space) -> None:
        """Makes a namespace known. Idempotent, and cheap where it is known. IncompatibleError if
        it is known with other sizes (the first description stays)."""

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Hit | None]:
        """One answer per key. Changes nothing but counters."""

    def lookup_packed(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """The same as one `PACKED_HIT` per key: for many keys, without an object for each."""

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Whether each has a page now. Not a lookup: it counts nothing."""

    def reserve(
        self, namespace: bytes, count: int, lease_s: float, tenant: bytes = NO_TENANT
    ) -> list[Slot]:
        """Up to `count` slots of a share; fewer where its free slots are fewer. Never grows, never
        evicts."""

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        """Idempotent: the same commit again gets the same verdict."""

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        """Gives unused or half-written slots back: reusable after the grace time. Idempotent; a
        slot of another generation, or published, is left alone."""

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Marks these pages and all their ancestors as used in this step. Cheap where they
        are already: nothing is written."""

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        """Evicts these pages, named by (key, generation); others of the key stay. Returns how
        many were there."""

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        """Ends leases and grace times, evicts what has outlived its `ttl_s`, then makes room:
        `wanted` says in which shares how many slots should become free. Where FREE, graced and
        growable slots do not reach that, it evicts until they reach an eighth more: the coldest of
        the pages that would go first in their shares decides; if it is of the wanting share, pages
        are evicted one by one, else the segment of its share with the lowest mean age is emptied.
        At equal age the share with the most segments gives. Idle segments of other shares (no
        page, no reservation) go before any page. All that within the quotas; what is above its
        maximum gives way in any case. `can_grow` False: the disk has less than the budget, so what
        the budget has left is no room."""

    def grow(self, namespace: bytes, tenant: bytes = NO_TENANT) -> int | Refused:
        """The number of a new segment of a share in state CREATING. One that is not `grown` within
        60 s is handed out for deletion by `sweep`."""

    def grown(self, segment: int) -> bool:
        """The segment's file is there: its slots are FREE. Idempotent. False: it was given up
        meanwhile (or never asked for); the caller deletes the file."""

    def shrunk(self, segment: int) -> None:
        """The segment's file is gone: its bytes leave the budget, and whatever was still said
        of its slots is void. Idempotent; numbers are never used again."""

    def adopt(
        self, segment: int, namespace: bytes, pages: Sequence[Page], tenant: bytes = NO_TENANT
    ) -> int:
        """Takes over a segment found on the store, with the pages found in it, after `attach` of
        its namespace; pages whose key is known are dropped, and so is all of a segment that is
        known. Returns how many were taken. Raises ExhaustedError if the budget does not hold it."""

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """All that there are, one for each owner, in place of those before. The caller sees to it
        that the guarantees fit the capacity."""

    def stats(self) -> CatalogStats: ...

    def hottest(self, namespace: bytes, count: int) -> list[HotPage]:
        """Up to `count` pages (at most 1,024), the last used first and, of one minute, those with
        the smallest chunk index first: so a page comes after its parent. For people."""

    def segments(self) -> dict[int, SegmentEntry]:
        """All segments by number: cheap, whatever the number of pages."""

    def snapshot(self) -> Snapshot:
        """Everything, as plain values: for tests and `kvferry check`, slow where there is much.
        Raises CorruptError where the records contradict each other."""


def counted(space: SpaceStats, counts: Mapping[bytes, tuple[int, int]]) -> SpaceStats:
    """With these lookups and hits by namespace added."""
    lookups, hits = counts.get(space.namespace, (0, 0))
    return replace(
        space,
        lookup_key_count=space.lookup_key_count + lookups,
        hit_key_count=space.hit_key_count + hits,
    )


# What every implementation checks in the same words.


def check_space(known: Space, asked: Space) -> None:
    """Raises IncompatibleError if a namespace is known with other sizes."""
    fields = ("slot_count", "slot_bytes", "slice_count", "chunk_tokens")
    differing = [name for name in fields if getattr(known, name) != getattr(asked, name)]
    if differing:
        raise IncompatibleError(
            "catalog.space",
            "the namespace is known with other sizes",
            known={name: getattr(known, name) for name in differing},
            asked={name: getattr(asked, name) for name in differing},
        )


def check_slices(commit: Commit, slice_count: int) -> range:
    """The slices of a commit. Raises InternalError if the page does not have them."""
    slices = range(commit.first_slice, commit.first_slice + commit.slice_count)
    if not slices or slices.start < 0 or slices.stop > slice_count:
        raise InternalError(
            "catalog.slices", "slices are outside the page", asked=slices, count=slice_count
        )
    return slices


def check_segment_bytes(known_bytes: int, asked_bytes: int) -> None:
    """Raises ConfigError if a store is opened with another segment size than before."""
    if known_bytes != asked_bytes:
        raise ConfigError(
            "catalog.segment_bytes",
            "segment_bytes of a store never changes",
            catalog_bytes=known_bytes,
            asked_bytes=asked_bytes,
        )


def unknown_namespace(namespace: bytes) -> UnavailableError:
    return UnavailableError(
        "catalog.unknown_namespace",
        "the catalog does not know the namespace: attach it",
        namespace=namespace.hex(),
    )
