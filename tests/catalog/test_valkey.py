"""The catalog on Valkey keeps the contract, and knows what its model knows."""

import pytest
from hypothesis import HealthCheck, settings

from kvferry.catalog.base import Policy, Verdict
from kvferry.catalog.eviction import REACH_FIRST
from kvferry.testing.catalog import (
    CAPACITY_BYTES,
    LEASE_S,
    SEGMENT_BYTES,
    STORE,
    A,
    CatalogSuite,
    Driver,
    key,
)
from kvferry.testing.catalog_eviction import CatalogEvictionSuite
from kvferry.testing.catalog_pair import CatalogMachine, Pair, random_life
from kvferry.testing.catalog_quotas import CatalogQuotasSuite
from kvferry.testing.catalog_space import CatalogSpaceSuite
from kvferry.testing.clock import ManualClock
from kvferry.testing.valkey import clocked_catalog


class _Valkey:
    @pytest.fixture
    def catalog(self, clock, policy, empty_server):
        return clocked_catalog(empty_server.url, clock, policy=policy)

    @pytest.fixture
    def again(self, clock, empty_server):
        return clocked_catalog(empty_server.url, clock)


class TestValkey(_Valkey, CatalogSuite):
    pass


class TestValkeyEviction(_Valkey, CatalogEvictionSuite):
    pass


class TestValkeySpace(_Valkey, CatalogSpaceSuite):
    pass


class TestValkeyQuotas(_Valkey, CatalogQuotasSuite):
    pass


def test_when_the_servers_clock_goes_back_time_goes_on(empty_server):
    """After a failover to a host that is behind, leases neither end at once nor hang."""
    clock, behind = ManualClock(start_s=1e9), ManualClock(start_s=5e8)
    driver = Driver(clocked_catalog(empty_server.url, clock), clock)
    driver.catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    driver.catalog.attach(A)
    driver.grow()
    (slot,) = driver.reserve(1)
    clock.advance(LEASE_S / 2)
    driver.catalog.sweep()
    other = clocked_catalog(empty_server.url, behind)
    assert not other.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert other.sweep().expired_count == 0
    behind.advance(LEASE_S / 2 - 0.5)
    assert other.sweep().expired_count == 0
    behind.advance(0.5)
    assert other.sweep().expired_count == 1
    assert driver.commit(key("x"), slot) is Verdict.EXPIRED, "time went back"
    other.close()
    driver.catalog.close()


@pytest.fixture(scope="module")
def machine_server(valkey_server):
    ValkeyMachine.server = valkey_server


class ValkeyMachine(CatalogMachine):
    server = None

    def make(self, clock):
        self.server.say("FLUSHALL")
        return clocked_catalog(self.server.url, clock)


@pytest.mark.usefixtures("machine_server")
class TestValkeyMachine(ValkeyMachine.TestCase):
    settings = settings(
        max_examples=60,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.mark.parametrize("policy", Policy)
def test_a_long_life_is_that_of_the_model(empty_server, policy):
    pair = Pair(lambda clock: clocked_catalog(empty_server.url, clock, policy=policy), 1, 5, policy)
    said = random_life(pair, seed=1, step_count=5000, check_every=100)
    assert all(said.values())
    assert (pair.reaches() != {REACH_FIRST}) is (policy is Policy.ADAPTIVE), "nothing came back"
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_long_lives_are_those_of_the_model(empty_server, seed):
    pair = Pair(lambda clock: clocked_catalog(empty_server.url, clock), seed, 3 + seed % 9)
    random_life(pair, seed, step_count=20_000, check_every=100)
    pair.close()
