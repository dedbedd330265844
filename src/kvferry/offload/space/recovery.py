"""A catalog that knows less than the store holds takes over what the pages say of themselves.

Runs on the runner thread before anything is reserved: after the catalog was lost, moved or taken
over, and as a cheap check at every start.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.catalog.base import NO_TENANT, Catalog, Page, Space
from kvferry.catalog.snapshot import SegmentState
from kvferry.errors import ExhaustedError, UnavailableError
from kvferry.metrics import Metrics
from kvferry.pages.base import FoundPage, PageStore, SegmentFacts, StoreFacts

log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """What was done, in segments; `page_count`: pages that were taken over. Deleted: there was no
    room for it, or it was there twice."""

    known_count: int = 0
    adopted_count: int = 0
    deleted_count: int = 0
    forgotten_count: int = 0
    page_count: int = 0


def recover(
    catalog: Catalog,
    pages: PageStore,
    facts: StoreFacts,
    metrics: Metrics,
    on_segment: Callable[[int, int], None] = lambda done_count, count: None,
) -> Recovered:
    """Adopts every segment of the store that the catalog does not know, deletes those for which
    its budget has no room, and forgets those whose file is gone or says nothing of itself. Of a
    number that is there twice nobody knows which file is meant: both are deleted. `on_segment`:
    told how many segments are done, of how many."""
    known = catalog.segments()
    recovered = Recovered()
    found = _single(pages, recovered)  # after `known`: what was READY then has a file now
    for index, segment in enumerate(found):
        on_segment(index, len(found))
        if segment.segment in known:
            recovered.known_count += 1
        else:
            _adopt(catalog, pages, facts, metrics, segment, recovered)
    on_segment(len(found), len(found))
    present = {segment.segment for segment in found}
    for number, entry in known.items():
        if entry.state is SegmentState.READY and number not in present and is_gone(pages, number):
            catalog.shrunk(number)
            recovered.forgotten_count += 1
    return recovered


def _single(pages: PageStore, recovered: Recovered) -> list[SegmentFacts]:
    """The segments that are there once; the others go."""
    found = pages.segments()
    counts = Counter(segment.segment for segment in found)
    for number, count in counts.items():
        if count > 1 and is_gone(pages, number):
            log.warning("segment %d was there %d times: it is deleted", number, count)
            recovered.deleted_count += 1
    return [segment for segment in found if counts[segment.segment] == 1]


def is_gone(pages: PageStore, number: int) -> bool:
    """Whatever is left of the segment goes. False: it may be on a root that is out, and come back
    with that."""
    try:
        pages.delete_segment(number)
    except UnavailableError:
        return False
    return True


def _adopt(
    catalog: Catalog,
    pages: PageStore,
    facts: StoreFacts,
    metrics: Metrics,
    segment: SegmentFacts,
    recovered: Recovered,
) -> None:
    geometry, entries = segment.geometry, list(pages.scan(segment.segment))
    catalog.attach(
        Space(
            namespace=segment.namespace,
            slot_count=segment.slot_count,
            slot_bytes=geometry.slot_bytes(facts.alignment_bytes),
            slice_count=geometry.slice_count,
            chunk_tokens=geometry.chunk_tokens,
            description="",
        )
    )
    found = [
        Page(
            entry.page.key,
            entry.page.parent,
            entry.page.chunk_index,
            entry.address,
            entry.page.generation,
        )
        for entry in entries
    ]
    try:
        count = catalog.adopt(segment.segment, segment.namespace, found, tenant_of(entries))
    except ExhaustedError:
        pages.delete_segment(segment.segment)
        recovered.deleted_count += 1
        return
    recovered.adopted_count += 1
    recovered.page_count += count
    metrics.count("kvferry_catalog_adoptions_total", count)


def tenant_of(found: Sequence[FoundPage]) -> bytes:
    """Whose segment it is: that of most of its pages (of stores older than shares, several)."""
    counts = Counter(entry.page.tenant for entry in found)
    return max(sorted(counts), key=counts.__getitem__, default=NO_TENANT)
