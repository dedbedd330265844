"""After a catalog was lost or restored from an old copy, what the store holds is found again, and
what it no longer holds is forgotten: otherwise hits or space would be lost for good."""

import pytest

from kvferry.catalog.base import Space
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.snapshot import SegmentState
from kvferry.layout import Address
from kvferry.metrics import Metrics
from kvferry.offload.space.recovery import recover
from kvferry.offload.space.room import space_of
from kvferry.pages.facts import Asked, segment_facts
from kvferry.pages.memory import Medium, MemoryPages, Segment
from kvferry.testing.clock import ManualClock
from kvferry.testing.staging import Driver, page_id
from tests.offload.parts import make_part
from tests.pages.test_spread import SpreadPlace

PART = make_part()


@pytest.fixture
def pages():
    store = MemoryPages(Medium(), ManualClock(), Asked(1 << 20, 4096, 1 << 18))
    store.open()
    return store


def open_catalog(facts) -> MemoryCatalog:
    catalog = MemoryCatalog(ManualClock(), grace_s=0.0)
    catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
    return catalog


def grow(catalog: MemoryCatalog, space: Space) -> int:
    catalog.attach(space)
    segment = catalog.grow(space.namespace)
    assert catalog.grown(segment)
    return segment


def test_an_empty_catalog_finds_the_pages_again(pages):
    facts = pages.open()
    pages.create_segment(3, PART.namespace, PART.geometry)
    page = page_id("a", generation=1, namespace=PART.namespace)
    Driver(pages, PART.geometry).write(page, Address(3, 1))
    catalog, metrics = open_catalog(facts), Metrics()

    recover(catalog, pages, facts, metrics)

    (hit,) = catalog.lookup(PART.namespace, [page.key])
    assert hit == (Address(3, 1), page.generation)
    assert metrics.value("kvferry_catalog_adoptions_total") == 1


def test_a_segment_without_a_file_is_forgotten(pages):
    facts = pages.open()
    catalog = open_catalog(facts)
    gone = grow(catalog, space_of(PART, facts))
    kept = grow(catalog, space_of(PART, facts))
    pages.create_segment(kept, PART.namespace, PART.geometry)

    recover(catalog, pages, facts, Metrics())

    assert set(catalog.segments()) == {kept} != {gone}
    assert catalog.segments()[kept].state is SegmentState.READY


def test_a_segment_that_is_being_made_is_left_alone(pages):
    facts = pages.open()
    catalog = open_catalog(facts)
    catalog.attach(space_of(PART, facts))
    segment = catalog.grow(PART.namespace)

    recover(catalog, pages, facts, Metrics())

    assert catalog.segments()[segment].state is SegmentState.CREATING


def test_of_a_segment_that_is_there_twice_nothing_is_left():
    """Its number was used again after the catalog was lost while a root was out."""
    place = SpreadPlace((None, None))
    pages = place.store()
    facts = pages.open()
    catalog = open_catalog(facts)
    kept, twice = (grow(catalog, space_of(PART, facts)) for _ in range(2))
    for number in (kept, twice):
        pages.create_segment(number, PART.namespace, PART.geometry)
    for other in place.places:
        if twice not in other.medium.segments:
            other.medium.segments[twice] = Segment(
                segment_facts(facts, twice, b"o" * 32, PART.geometry)
            )

    assert recover(catalog, pages, facts, Metrics()).deleted_count == 1

    assert set(catalog.segments()) == {kept}
    assert [found.segment for found in pages.segments()] == [kept]
