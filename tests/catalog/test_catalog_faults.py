"""Faults that never fire, or do less than they say, would make every test with faults pass."""

import pytest

from kvferry.catalog.base import Verdict
from kvferry.catalog.memory import MemoryCatalog
from kvferry.errors import UnavailableError
from kvferry.testing.catalog import CAPACITY_BYTES, SEGMENT_BYTES, STORE, A, Driver, chain, key
from kvferry.testing.catalog_faults import CatalogFault, FaultyCatalog, SharedCatalog
from kvferry.testing.clock import Chance, ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def inner(clock):
    def make():
        catalog = MemoryCatalog(clock)
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        catalog.attach(A)
        return catalog

    return SharedCatalog(make)


@pytest.fixture
def faulty(inner, clock):
    return FaultyCatalog(inner, clock, Chance(1), {})


@pytest.fixture
def driver(inner, clock):
    driver = Driver(inner, clock)
    driver.grow(A)
    return driver


def test_without_rates_it_is_the_catalog(driver, faulty):
    slots = driver.store(chain("x", 2))
    hits = faulty.lookup(A.namespace, chain("x", 2))
    assert [hit.address for hit in hits] == [slot.address for slot in slots]
    assert not +faulty.fired


def test_unavailable_did_nothing(driver, faulty, inner):
    faulty.rates = {CatalogFault.UNAVAILABLE: 1.0}
    with pytest.raises(UnavailableError):
        faulty.reserve(A.namespace, 1, 30.0)
    assert inner.snapshot().reserved == {}
    assert faulty.fired[CatalogFault.UNAVAILABLE] == 1


def test_a_lost_reply_did_it(driver, faulty, inner):
    faulty.rates = {CatalogFault.LOST_REPLY: 1.0}
    with pytest.raises(UnavailableError):
        faulty.reserve(A.namespace, 1, 30.0)
    assert len(inner.snapshot().reserved) == 1


def test_late_takes_time(driver, faulty, clock):
    faulty.rates = {CatalogFault.LATE: 1.0}
    start_s = clock.now_s()
    faulty.lookup(A.namespace, [key("x")])
    assert start_s < clock.now_s()


def test_a_duplicate_commit_says_what_the_first_one_said(driver, faulty):
    faulty.rates = {CatalogFault.DUPLICATE: 1.0}
    (slot,) = driver.reserve(1)
    driver.catalog = faulty
    assert driver.commit(key("x"), slot) is Verdict.PUBLISHED
    assert faulty.fired[CatalogFault.DUPLICATE] == 1


def test_a_stale_lookup_is_one_of_an_earlier_time(driver, faulty):
    before = faulty.lookup(A.namespace, [key("x")])
    driver.store([key("x")])
    faulty.rates = {CatalogFault.STALE: 1.0}
    assert faulty.lookup(A.namespace, [key("x")]) == before == [None]
    assert faulty.fired[CatalogFault.STALE] == 1


def test_a_lost_catalog_knows_nothing_and_a_restored_one_what_it_knew(driver, inner):
    driver.store([key("x")])
    saved = inner.save()
    driver.store([key("y")])
    inner.restore(saved)
    assert driver.present([key("x"), key("y")]) == [True, False]
    inner.lose()
    assert driver.present([key("x"), key("y")]) == [False, False]
    assert inner.snapshot().segments == {}
