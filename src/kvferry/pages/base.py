"""Contract of a page store: it writes and reads extents of pages and proves what it read.

Life of an operation:

1. The caller gets memory for its staging (`allocate`), registers it once, fills or reserves a range
   of it, and submits a batch.
2. From `submit` on the range belongs to the store, until the operation's `Result` was returned by
   `poll` or `wait`: success or not, late or not. Whoever must not wait longer forgets the operation
   and keeps its range out of use. A store whose medium may never answer gives an operation up at
   some time (`overdue`), and returns it as failed when nothing moves its bytes any more.
3. A write stamps a header before each payload, with the checksum over the padded payload. A read
   checks each header against what was asked, then the checksum of each payload. Bytes are good
   only if the result says `OK`; anything else is a miss with a reason.

Segments are made and deleted by one caller (the scheduler side's runner), never by a write: a
write to a segment that is not there is a result, not a new file.

Threads: `submit`, `poll` and `wait` belong to one thread; the other methods may be called from
any thread. Nothing here holds the GIL while bytes move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry.layout import Address, PageGeometry


@dataclass(frozen=True, slots=True)
class PageId:
    """What a page says of itself in each of its headers. All digests are raw bytes."""

    namespace: bytes  # 32
    key: bytes  # 32
    parent: bytes  # 32, zeros for the first chunk
    chunk_index: int
    group: int  # identity of the cache group: first 4 bytes of its digest, big-endian
    generation: bytes  # 16
    tenant: bytes = bytes(16)


class Outcome(Enum):
    """How an operation ended. Everything but OK is a miss for a read and a drop for a write."""

    OK = "ok"
    ABSENT = "absent"  # no such segment, or a hole where the header should be
    FOREIGN = "foreign"  # a valid header of another page, generation or slice
    CORRUPT = "corrupt"  # header or payload fails its checksum
    SHORT = "short"  # fewer bytes than an extent has
    IO_ERROR = "io_error"  # the system said no; `Result.errno` says what
    NO_SPACE = "no_space"  # ENOSPC or EDQUOT


@dataclass(frozen=True, slots=True)
class Extent:
    """One operation: the slices [first_slice, first_slice + slice_count) of one page.

    `buffer_address`: absolute address of slice `first_slice`'s header inside registered staging,
    4 KiB aligned; slices follow at `geometry.slice_bytes`.
    `checksums`: for a write whose payload checksums are known already (computed on a GPU), one
    per slice; None: the store computes them.
    `verify_payload`: for a read; False leaves the payload's checksum to the caller, who finds it
    in `Result.checksums`.
    """

    page: PageId
    geometry: PageGeometry
    address: Address
    first_slice: int
    slice_count: int
    buffer_address: int
    checksums: tuple[int, ...] | None = None
    verify_payload: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """How one operation of one batch ended."""

    job: int
    index: int
    outcome: Outcome
    errno: int = 0
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Overdue:
    """I/Os of a store that has deadlines of its own: those that are late now, whose buffers are out
    of use until they end, and all that ever were."""

    now_count: int = 0
    ever_count: int = 0


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What the superblock says. `segment_bytes` includes the segment's own header."""

    store_id: bytes  # 16
    capacity_bytes: int
    alignment_bytes: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What a segment's own header says: enough to rebuild a catalog from the pages."""

    segment: int
    namespace: bytes
    geometry: PageGeometry
    slot_count: int


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page found by `scan`: all its headers are valid and carry one generation."""

    page: PageId
    address: Address


class PageStore(Protocol):
    """See the module. Constructors only store; `open` acquires; `close` is idempotent."""

    def open(self) -> StoreFacts:
        """Opens an existing store, or creates it. Raises ConfigError where path, rights or the
        superblock disagree with what was asked, UnavailableError where the world does."""

    def close(self) -> None:
        """Waits for what is in flight, at most 5 s, then lets go of it."""

    def allocate(self, length_bytes: int) -> tuple[int, object] | None:
        """Memory for staging that this store needs, if any will not do (None): its address, and
        what keeps it. It is the store's until `close`, and readable afterwards as long as it is
        kept. Raises ConfigError where the machine has none to give."""

    def register(self, address: int, length_bytes: int) -> None:
        """Makes a range of memory nameable in operations. It must outlive the store."""

    def submit_reads(self, extents: Sequence[Extent]) -> int:
        """Starts a batch; returns its job number. Reads go before writes that wait."""

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        """Starts a batch; returns its job number."""

    def leave_room(self, is_wanted: bool) -> None:
        """Whether processors are wanted by others: reads that copy take a few of them then. Any
        thread."""

    def poll(self) -> list[Result]:
        """Results since the last call, in any order, each exactly once. Never waits."""

    def wait(self, timeout_s: float) -> list[Result]:
        """As poll, but waits up to `timeout_s` for the first result, without the GIL."""

    def overdue(self) -> Overdue:
        """What has had no answer for too long. Any thread."""

    def create_segment(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        """Preallocates a segment. Idempotent for equal arguments. Raises ExhaustedError when the
        disk is full (nothing is left behind)."""

    def delete_segment(self, segment: int) -> None:
        """Removes a segment and gives its space back. A segment that is not there is no error."""

    def has_segment(self, segment: int) -> bool:
        """Whether it is there. Raises UnavailableError where it may be and cannot be used now."""

    def segments(self) -> list[SegmentFacts]:
        """All segments with a valid header, by number."""

    def scan(self, segment: int) -> Iterator[FoundPage]:
        """The readable pages of a segment, by their headers alone (payloads are not read)."""

    def used_bytes(self) -> int:
        """What the store takes on its medium (blocks allocated, not file lengths)."""


def slot_count(facts: StoreFacts, geometry: PageGeometry) -> int:
    """Slots in a segment of this geometry: the first `alignment_bytes` hold its own header."""
    room_bytes = facts.segment_bytes - facts.alignment_bytes
    return room_bytes // geometry.slot_bytes(facts.alignment_bytes)


def slot_offset_bytes(facts: StoreFacts, geometry: PageGeometry, slot: int) -> int:
    """Where a slot starts in its segment."""
    return facts.alignment_bytes + slot * geometry.slot_bytes(facts.alignment_bytes)


def refusal(segment: SegmentFacts | None, extent: Extent) -> Outcome | None:
    """Why an operation is not even tried; None if the extent lies in the segment as it is."""
    if segment is None or extent.address.slot >= segment.slot_count:
        return Outcome.ABSENT
    if (segment.namespace, segment.geometry) != (extent.page.namespace, extent.geometry):
        return Outcome.FOREIGN
    return None
