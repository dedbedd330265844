"""A catalog that knows less than the store holds takes over what the pages say of themselves.

Runs on the runner thread before anything is reserved: after the catalog was lost, moved or taken
over, and as a cheap check at every start.
"""

from kvferry.catalog.base import Catalog, Page, Space
from kvferry.catalog.snapshot import SegmentState
from kvferry.errors import ExhaustedError
from kvferry.metrics import Metrics
from kvferry.pages.base import PageStore, SegmentFacts, StoreFacts


def recover(catalog: Catalog, pages: PageStore, facts: StoreFacts, metrics: Metrics) -> None:
    """Adopts every segment of the store that the catalog does not know, deletes those for which
    its budget has no room, and forgets those whose file is gone or says nothing of itself."""
    known = catalog.segments()
    found = pages.segments()  # after `known`: what was READY then has a file now
    for segment in found:
        if segment.segment not in known:
            _adopt(catalog, pages, facts, metrics, segment)
    present = {segment.segment for segment in found}
    for number, entry in known.items():
        if entry.state is SegmentState.READY and number not in present:
            pages.delete_segment(number)
            catalog.shrunk(number)


def _adopt(
    catalog: Catalog, pages: PageStore, facts: StoreFacts, metrics: Metrics, segment: SegmentFacts
) -> None:
    geometry = segment.geometry
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
        for entry in pages.scan(segment.segment)
    ]
    try:
        count = catalog.adopt(segment.segment, segment.namespace, found)
    except ExhaustedError:
        pages.delete_segment(segment.segment)
        return
    metrics.count("kvferry_catalog_adoptions_total", count)
