"""Who gives way when room is needed: the policy of `sweep`, the same in every catalog.

1. What will be free soon counts: free, graced and growable slots. Where that is less than what
   is wanted (the low mark), an eighth of it more is made (the high mark), so that not every call
   evicts.
2. An idle segment of another namespace costs nothing: it goes first.
3. Then the coldest page decides, of those that go first in their namespaces. If the namespace
   that wants room owns it, that one page goes; if another does, the segment of the owner whose
   pages are oldest on average is emptied.

Several namespaces that use their pages thus share the store by use, and one that nobody uses any
more gives up segment after segment.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.catalog.base import Space, SpaceStats
from kvferry.catalog.snapshot import SegmentEntry, SegmentState

HIGH_MARK_PART = 8


@dataclass(slots=True)
class SegmentHeat:
    """One segment's figures. `age_sum`: sum of the ages of its pages."""

    number: int
    namespace: bytes
    state: SegmentState
    until_s: float
    slot_count: int
    page_count: int
    reserved_count: int
    graced_count: int
    age_sum: int

    @property
    def entry(self) -> SegmentEntry:
        return SegmentEntry(self.namespace, self.state, self.until_s, self.slot_count)

    @property
    def mean_age(self) -> float:
        return self.age_sum / self.page_count if self.page_count else 0.0

    @property
    def soon_free_count(self) -> int:
        """Slots that are free now or will be without anybody's loss."""
        if self.state is SegmentState.EMPTIED:
            return 0
        return self.slot_count - self.page_count - self.reserved_count


class Book(Protocol):
    """What the policy asks of a catalog, inside one call of `sweep`."""

    def heats(self) -> list[SegmentHeat]:
        """All segments, as they are now."""

    def slots_per_segment(self, namespace: bytes) -> int | None:
        """None: the namespace is unknown."""

    def coldest_age(self, namespace: bytes) -> int | None:
        """Age of the page that goes first; None: there is none."""

    def evict_coldest(self, namespace: bytes) -> None:
        """Evicts the page that goes first by the policy (`eviction`)."""

    def empty(self, segment: int) -> None:
        """Evicts all pages of a READY segment and makes it EMPTIED."""


def make_room(
    book: Book, now_s: float, room_max: int, wanted: Sequence[tuple[bytes, int]], can_grow: bool
) -> None:
    """`room_max`: how many segments the budget holds."""
    heats = book.heats()
    spare_count = room_max - sum(heat.state is not SegmentState.EMPTIED for heat in heats)
    for heat in _coldest_first(heats)[: max(0, -spare_count)]:  # the store was made smaller
        book.empty(heat.number)
    if not can_grow:
        spare_count = 0
    for namespace, count in wanted:
        spare_count = _make_room_for(book, now_s, namespace, count, max(0, spare_count))


def _make_room_for(book: Book, now_s: float, wanting: bytes, count: int, spare_count: int) -> int:
    """`spare_count`: segments that may still be grown; returns how many are left to others."""
    slot_count = book.slots_per_segment(wanting)
    if slot_count is None:
        return spare_count
    heats = book.heats()
    idle = _idle(heats, wanting, now_s)
    missing = count - sum(heat.soon_free_count for heat in heats if heat.namespace == wanting)
    if missing > 0:
        missing += count // HIGH_MARK_PART
    while missing > 0:
        if spare_count > 0:
            spare_count -= 1
            missing -= slot_count
        elif idle:
            book.empty(idle.pop(0))
            heats = book.heats()
            spare_count += 1
        elif (victim := _coldest_namespace(book, heats, wanting)) is None:
            break
        elif victim == wanting:
            book.evict_coldest(wanting)
            missing -= 1
        else:
            used = [heat for heat in heats if heat.namespace == victim and heat.page_count]
            book.empty(_coldest_first(used)[0].number)
            spare_count += 1
            heats = book.heats()
    return spare_count


def _idle(heats: list[SegmentHeat], wanting: bytes, now_s: float) -> list[int]:
    """Segments of other namespaces with nothing in them, and not just grown."""
    return [
        heat.number
        for heat in heats
        if heat.state is SegmentState.READY
        and heat.namespace != wanting
        and heat.page_count == heat.reserved_count == 0
        and heat.until_s <= now_s
    ]


def _coldest_namespace(book: Book, heats: list[SegmentHeat], wanting: bytes) -> bytes | None:
    """Whose page is the coldest of all; at equal age who has the most segments, then `wanting`."""
    sizes = Counter(heat.namespace for heat in heats if heat.state is SegmentState.READY)
    ages = {n: age for n in sizes if (age := book.coldest_age(n)) is not None}
    return min(ages, key=lambda n: (ages[n], -sizes[n], n != wanting, n), default=None)


def _coldest_first(heats: list[SegmentHeat]) -> list[SegmentHeat]:
    """READY segments: those without pages, then the oldest on average."""
    ready = [heat for heat in heats if heat.state is SegmentState.READY]
    return sorted(ready, key=lambda heat: (heat.mean_age, heat.number))


def space_stats(space: Space, heats: Sequence[SegmentHeat]) -> SpaceStats:
    """One namespace's figures."""
    own = [heat for heat in heats if heat.namespace == space.namespace]
    return SpaceStats(
        namespace=space.namespace,
        description=space.description,
        page_count=sum(heat.page_count for heat in own),
        reserved_count=sum(heat.reserved_count for heat in own),
        graced_count=sum(heat.graced_count for heat in own),
        segment_count=len(own),
        slot_bytes=space.slot_bytes,
        chunk_tokens=space.chunk_tokens,
    )
