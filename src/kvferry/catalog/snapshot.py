"""All that a catalog says at one moment, as plain values, and what must be true of it.

For tests, the simulated world and `kvferry check`. Two catalogs that obey the same rules and were
told the same have equal snapshots.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvferry.layout import Address


class SegmentState(Enum):
    """Life of a segment: `grow`, `grown`, emptied by `sweep`, `shrunk`."""

    CREATING = 1
    READY = 2
    EMPTIED = 3


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """`until_s`: CREATING: when it is given up; READY: from when on another namespace may take it
    while idle; EMPTIED: from when on it may be deleted."""

    namespace: bytes
    state: SegmentState
    until_s: float
    slot_count: int
    tenant: bytes = bytes(16)


@dataclass(frozen=True, slots=True)
class ReservedEntry:
    """`key`: what its first commit was for, None before that. `slices`: committed so far."""

    generation: bytes
    lease_end_s: float
    key: bytes | None
    slices: frozenset[int]


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A published page. `age`: number of the step of its last use; `uses`: how many steps it was
    used in, as far as they are counted."""

    address: Address
    generation: bytes
    age: int
    chunk_index: int
    parent: bytes
    uses: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`graced`: slots and the time from which on they are free. Pages by (namespace, key).
    `recalls`: by namespace what `eviction.Recall` has. `quotas`: by owner what `quotas.QuotaRow`
    has."""

    capacity_bytes: int
    segment_bytes: int
    namespaces: frozenset[bytes]
    segments: dict[int, SegmentEntry]
    free: frozenset[Address]
    reserved: dict[Address, ReservedEntry]
    graced: dict[Address, float]
    pages: dict[tuple[bytes, bytes], PageEntry]
    recalls: dict[bytes, tuple[float, int, int]]
    quotas: dict[bytes, tuple[int, int, float, float]] = field(default_factory=dict)


def check_invariants(snapshot: Snapshot) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    return [*_budget(snapshot), *_slots(snapshot), *_pages(snapshot)]


def excess_bytes(snapshot: Snapshot) -> int:
    """What the segments take beyond the capacity."""
    return max(0, len(snapshot.segments) * snapshot.segment_bytes - snapshot.capacity_bytes)


def _budget(snapshot: Snapshot) -> Iterator[str]:
    if excess_bytes(snapshot):
        taken_bytes = len(snapshot.segments) * snapshot.segment_bytes
        yield f"segments take {taken_bytes} bytes of {snapshot.capacity_bytes}"
    for number, segment in snapshot.segments.items():
        if segment.namespace not in snapshot.namespaces:
            yield f"segment {number} is of an unknown namespace"


def _slots(snapshot: Snapshot) -> Iterator[str]:
    published = [page.address for page in snapshot.pages.values()]
    owners = Counter(snapshot.free)
    for owned in (snapshot.reserved, snapshot.graced, published):
        owners.update(list(owned))
    for address, count in owners.items():
        segment = snapshot.segments.get(address.segment)
        if count > 1:
            yield f"{address} has {count} owners"
        if segment is None or address.slot not in range(segment.slot_count):
            yield f"{address} is not a slot of any segment"
    yield from _segment_sums(snapshot, owners, {*snapshot.free, *published})


def _segment_sums(
    snapshot: Snapshot, owners: Counter[Address], usable: set[Address]
) -> Iterator[str]:
    """`usable`: slots that are free or published, which only a READY segment has."""
    sums = Counter(address.segment for address in owners)
    usable_sums = Counter(address.segment for address in usable)
    for number, segment in snapshot.segments.items():
        if segment.state is SegmentState.READY:
            if sums[number] != segment.slot_count:
                yield f"segment {number} has {segment.slot_count} slots, {sums[number]} known"
        elif usable_sums[number]:
            yield f"segment {number} is {segment.state.name} and has free slots or pages"


def _pages(snapshot: Snapshot) -> Iterator[str]:
    for (namespace, key), page in snapshot.pages.items():
        segment = snapshot.segments.get(page.address.segment)
        if segment is not None and segment.namespace != namespace:
            yield f"page {key.hex()} lies in a segment of another namespace"
        parent = snapshot.pages.get((namespace, page.parent))
        if parent is not None and parent.age < page.age:
            yield f"page {key.hex()} is younger than its parent"
