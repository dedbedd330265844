"""The invariant of guarantees, from what a catalog knew before and after a sweep."""

from collections.abc import Sequence

from kvferry.catalog.base import Swept, Want
from kvferry.catalog.snapshot import SegmentEntry, SegmentState, Snapshot


def pushed_below(
    before: Snapshot, after: Snapshot, wanted: Sequence[Want], swept: Swept
) -> list[bytes]:
    """Owners that lost a segment with pages to others and have less than they are guaranteed. Idle
    segments do not count, nor what somebody above its maximum gives up. Says nothing where pages
    lapsed: which segments were idle then, the snapshots do not tell."""
    if swept.lapsed_count or any(
        _count(before, o) > maximum for o, (_, maximum, *_) in before.quotas.items()
    ):
        return []
    used = {page.address.segment for page in before.pages.values()}
    wanting = {owner for want in wanted for owner in (want.namespace, want.tenant)}
    return [
        owner
        for owner, (guaranteed_count, *_) in before.quotas.items()
        if owner not in wanting and _is_below(before, after, owner, guaranteed_count, used)
    ]


def _is_below(
    before: Snapshot, after: Snapshot, owner: bytes, guaranteed_count: int, used: set[int]
) -> bool:
    own = {number for number, entry in before.segments.items() if _is_of(owner, entry)}
    left = {n for n in own if after.segments[n].state is not SegmentState.EMPTIED}
    emptied = {n for n in own - left if before.segments[n].state is SegmentState.READY}
    return bool(emptied & used) and len(left | (emptied - used)) < guaranteed_count


def _count(snapshot: Snapshot, owner: bytes) -> int:
    live = (e for e in snapshot.segments.values() if e.state is not SegmentState.EMPTIED)
    return sum(_is_of(owner, entry) for entry in live)


def _is_of(owner: bytes, entry: SegmentEntry) -> bool:
    return owner in (entry.namespace, entry.tenant)
