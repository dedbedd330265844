"""Reads pages back, payloads included, and says which do not hold what they should."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvferry.catalog.snapshot import Snapshot
from kvferry.device.staging import Staging, memory_from
from kvferry.errors import UnavailableError
from kvferry.layout import Address, PageGeometry
from kvferry.pages.base import Extent, Outcome, PageId, PageStore, SegmentFacts

BATCH_BYTES = 64 << 20
WAIT_S = 1.0


class Promise(NamedTuple):
    """A page that should be readable. `geometry` None: its segment is not there."""

    page: PageId
    geometry: PageGeometry | None
    address: Address


class Verdict(NamedTuple):
    """OK, or the first thing that is wrong with any slice of the page."""

    promise: Promise
    outcome: Outcome


def promised(snapshot: Snapshot, segments: Iterable[SegmentFacts]) -> list[Promise]:
    """What a catalog says is there, by place."""
    known = {(facts.segment, facts.namespace): facts.geometry for facts in segments}
    promises = [
        Promise(
            PageId(namespace, key, page.parent, page.chunk_index, 0, page.generation),
            known.get((page.address.segment, namespace)),
            page.address,
        )
        for (namespace, key), page in snapshot.pages.items()
    ]
    return sorted(promises, key=lambda promise: promise.address)


def found(pages: PageStore) -> Iterator[Promise]:
    """What the headers on the store say is there: for a store without a catalog."""
    for facts in pages.segments():
        for page in pages.scan(facts.segment):
            yield Promise(page.page, facts.geometry, page.address)


def verify(pages: PageStore, promises: Sequence[Promise]) -> Iterator[Verdict]:
    """Reads every page whole. `pages` is open and used by nobody else meanwhile."""
    readable = [promise for promise in promises if promise.geometry is not None]
    others = [promise for promise in promises if promise.geometry is None]
    out = {number for number in {p.address.segment for p in others} if _may_be_out(pages, number)}
    for promise in others:
        is_out = promise.address.segment in out
        yield Verdict(promise, Outcome.IO_ERROR if is_out else Outcome.ABSENT)
    if not readable:
        return
    slot_bytes = max(promise.geometry.page_bytes for promise in readable)
    staging = Staging(max(BATCH_BYTES, 2 * slot_bytes), slot_bytes, memory_from(pages.allocate))
    staging.open()
    pages.register(staging.address, staging.length_bytes)
    remaining = iter(readable)
    while batch := list(islice(remaining, staging.slot_count)):
        yield from _read(pages, staging, batch)
    staging.close()


def _may_be_out(pages: PageStore, segment: int) -> bool:
    """Whether the segment may be on a root that is out."""
    try:
        pages.has_segment(segment)
    except UnavailableError:
        return True
    return False


def _read(pages: PageStore, staging: Staging, batch: Sequence[Promise]) -> Iterator[Verdict]:
    """Staging is used from its start again for every batch, since no read is left behind."""
    extents = [
        Extent(
            promise.page,
            promise.geometry,
            promise.address,
            first_slice=0,
            slice_count=promise.geometry.slice_count,
            buffer_address=staging.address + index * staging.slot_bytes,
        )
        for index, promise in enumerate(batch)
    ]
    pages.submit_reads(extents)
    left_count = len(extents)
    while left_count:
        for result in pages.wait(WAIT_S):
            left_count -= 1
            yield Verdict(batch[result.index], result.outcome)
