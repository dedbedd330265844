"""The catalog on Valkey keeps the contract, and knows what its model knows."""

import pytest
from hypothesis import HealthCheck, settings

from kvferry.testing.catalog import CatalogSuite
from kvferry.testing.catalog_pair import CatalogMachine, Pair, random_life
from kvferry.testing.catalog_space import CatalogSpaceSuite
from kvferry.testing.valkey import clocked_catalog


class _Valkey:
    @pytest.fixture
    def catalog(self, clock, empty_server):
        return clocked_catalog(empty_server.url, clock)

    @pytest.fixture
    def again(self, clock, empty_server):
        return clocked_catalog(empty_server.url, clock)


class TestValkey(_Valkey, CatalogSuite):
    pass


class TestValkeySpace(_Valkey, CatalogSpaceSuite):
    pass


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


def test_a_long_life_is_that_of_the_model(empty_server):
    pair = Pair(lambda clock: clocked_catalog(empty_server.url, clock), seed=1, segments_max=5)
    said = random_life(pair, seed=1, step_count=5000, check_every=100)
    assert all(said.values())
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_long_lives_are_those_of_the_model(empty_server, seed):
    pair = Pair(lambda clock: clocked_catalog(empty_server.url, clock), seed, 3 + seed % 9)
    random_life(pair, seed, step_count=20_000, check_every=100)
    pair.close()
