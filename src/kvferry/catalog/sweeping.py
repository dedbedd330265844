"""Who gives way when room is needed: the policy of `sweep`, the same in every catalog.

1. What will be free soon counts: free, graced and growable slots. Where that is less than what
   is wanted (the low mark), an eighth of it more is made (the high mark), so that not every call
   evicts.
2. An idle segment of another share costs nothing: it goes first.
3. Then the coldest page decides, of those that go first in their shares. If the share that wants
   room owns it, that one page goes; if another does, the segment of the owner whose pages are
   oldest on average is emptied.

Several namespaces and tenants that use their pages thus divide the store by use, and one that
nobody uses any more gives up segment after segment. Quotas say who may not give or get.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.catalog.base import (
    AGE_STEP_S,
    CREATION_S,
    LAPSED_MAX,
    Share,
    ShareStats,
    Space,
    SpaceStats,
    Want,
)
from kvferry.catalog.quotas import Ledger, QuotaRow, ttl_s
from kvferry.catalog.snapshot import SegmentEntry, SegmentState

HIGH_MARK_PART = 8


@dataclass(slots=True)
class SegmentHeat:
    """One segment's figures. `age_sum`: sum of the ages of its pages."""

    number: int
    share: Share
    state: SegmentState
    until_s: float
    slot_count: int
    page_count: int
    reserved_count: int
    graced_count: int
    age_sum: int

    @property
    def entry(self) -> SegmentEntry:
        namespace, tenant = self.share
        return SegmentEntry(namespace, self.state, self.until_s, self.slot_count, tenant)

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

    def coldest_age(self, share: Share) -> int | None:
        """Age of the page that goes first; None: there is none."""

    def lapse(self, share: Share, age_max: int, count_max: int) -> int:
        """Evicts pages of this age or older, the oldest first. Returns how many."""

    def evict_coldest(self, share: Share) -> None:
        """Evicts the page that goes first by the policy (`eviction`)."""

    def empty(self, segment: int) -> None:
        """Evicts all pages of a READY segment and makes it EMPTIED."""

    def quotas(self) -> Mapping[bytes, QuotaRow]:
        """By owner."""

    def claim(self, owner: bytes, until_s: float) -> None:
        """Notes it in the owner's row."""


def lapse(book: Book, now_s: float) -> int:
    """Evicts pages that nobody used for their time to live. Returns how many."""
    rows, lapsed_count = book.quotas(), 0
    if not any(row.ttl_s for row in rows.values()):
        return 0
    for share in sorted(_sizes(book.heats())):
        unused_s = now_s - ttl_s(rows, share)
        if unused_s > 0:
            age_max = int(unused_s // AGE_STEP_S) - 1
            lapsed_count += book.lapse(share, age_max, LAPSED_MAX - lapsed_count)
    return lapsed_count


def make_room(
    book: Book, now_s: float, room_max: int, wanted: Sequence[Want], can_grow: bool
) -> int:
    """`room_max`: how many segments the budget holds. Returns how many pages were evicted for
    quotas."""
    ledger = Ledger(book.quotas(), room_max, now_s)
    for heat in book.heats():
        if heat.state is not SegmentState.EMPTIED:
            ledger.add(heat.share)
    evicted_count = sum(_lower(book, ledger, owner) for owner in ledger.above())
    while ledger.total > room_max and (heat := _coldest(book, ledger)):  # it was made smaller
        book.empty(heat.number)
        ledger.add(heat.share, -1)
    ledger.room_max = max(room_max, ledger.total) if can_grow else ledger.total
    return evicted_count + sum(_make_room_for(book, ledger, want, now_s) for want in wanted)


def _lower(book: Book, ledger: Ledger, owner: bytes) -> int:
    """Brings an owner down to its maximum. Returns how many pages were evicted."""
    evicted_count = 0
    while owner in ledger.above() and (heat := _coldest(book, ledger, owner)):
        evicted_count += _empty(book, ledger, heat)
    return evicted_count


def _coldest(book: Book, ledger: Ledger, owner: bytes | None = None) -> SegmentHeat | None:
    """The segment that is missed least, if need be one that is guaranteed. None: there is none."""
    found = _coldest_first([h for h in book.heats() if owner is None or owner in h.share])
    free = (heat for heat in found if ledger.may_lose(heat.share))
    return next(free, found[0] if found else None)


def _empty(book: Book, ledger: Ledger, heat: SegmentHeat) -> int:
    page_count = heat.page_count
    book.empty(heat.number)
    ledger.add(heat.share, -1)
    return page_count


def _make_room_for(book: Book, ledger: Ledger, want: Want, now_s: float) -> int:
    """Returns how many pages were evicted for quotas."""
    share = Share(want.namespace, want.tenant)
    slot_count = book.slots_per_segment(share.namespace)
    heats = book.heats()
    if slot_count is None:
        return 0
    count = min(want.count, ledger.slots_max(share, slot_count))
    missing = count - sum(h.soon_free_count for h in heats if h.share == share)
    if missing <= 0:
        return 0
    missing += count // HIGH_MARK_PART
    for owner in ledger.below(share):
        ledger.claim(owner, now_s + CREATION_S)
        book.claim(owner, now_s + CREATION_S)
    idle, sizes = _idle(heats, share, now_s), _sizes(heats)
    quota_count = 0
    while missing > 0:
        if ledger.spare(share) > 0:
            ledger.add(share)
            missing -= slot_count
            continue
        is_bound = ledger.is_bound(share)
        if heat := next((heat for heat in idle if ledger.gains(share, heat.share)), None):
            idle.remove(heat)
        elif (victim := _victim(book, ledger, share, sizes)) is None:
            break
        elif victim == share:
            book.evict_coldest(share)
            missing -= 1
            quota_count += is_bound
            continue
        else:
            used = [heat for heat in book.heats() if heat.share == victim and heat.page_count]
            heat = _coldest_first(used)[0]
        quota_count += _empty(book, ledger, heat) * is_bound
        sizes[heat.share] -= 1
    return quota_count


def _idle(heats: list[SegmentHeat], wanting: Share, now_s: float) -> list[SegmentHeat]:
    """Segments of other shares with nothing in them, and not just grown."""
    return [
        heat
        for heat in heats
        if heat.state is SegmentState.READY
        and heat.share != wanting
        and heat.page_count == heat.reserved_count == 0
        and heat.until_s <= now_s
    ]


def _sizes(heats: list[SegmentHeat]) -> Counter[Share]:
    """How many READY segments the shares have."""
    return Counter(heat.share for heat in heats if heat.state is SegmentState.READY)


def _victim(book: Book, ledger: Ledger, wanting: Share, sizes: Counter[Share]) -> Share | None:
    """Whose page is the coldest of all that may give; at equal age who has the most segments, then
    `wanting`. Who wants below its guarantee takes from others if it can."""
    ages = {
        share: age
        for share, size in sizes.items()
        if size
        and (share == wanting or ledger.may_give(share, wanting))
        and (age := book.coldest_age(share)) is not None
    }
    below = ledger.below(wanting)
    others = {share for share in ages if below and not set(below) & set(share)}
    return min(others or ages, key=lambda s: (ages[s], -sizes[s], s != wanting, s), default=None)


def _coldest_first(heats: list[SegmentHeat]) -> list[SegmentHeat]:
    """READY segments: those without pages, then the oldest on average."""
    ready = [heat for heat in heats if heat.state is SegmentState.READY]
    return sorted(ready, key=lambda heat: (heat.mean_age, heat.number))


def share_stats(heats: Sequence[SegmentHeat], spaces: Sequence[Space]) -> tuple[ShareStats, ...]:
    """What the shares have, in order."""
    slot_bytes = {space.namespace: space.slot_bytes for space in spaces}
    segments = Counter(heat.share for heat in heats)
    pages: Counter[Share] = Counter()
    for heat in heats:
        pages[heat.share] += heat.page_count
    return tuple(
        ShareStats(share, count, pages[share], pages[share] * slot_bytes[share.namespace])
        for share, count in sorted(segments.items())
    )


def space_stats(space: Space, heats: Sequence[SegmentHeat]) -> SpaceStats:
    """One namespace's figures."""
    own = [heat for heat in heats if heat.share.namespace == space.namespace]
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
