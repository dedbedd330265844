"""The embedded catalog keeps the contract, and knows what its model knows."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvferry.catalog.base import Policy
from kvferry.catalog.eviction import REACH_FIRST
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.testing.catalog import CatalogSuite
from kvferry.testing.catalog_eviction import CatalogEvictionSuite
from kvferry.testing.catalog_pair import CatalogMachine, Pair, random_life
from kvferry.testing.catalog_quotas import CatalogQuotasSuite
from kvferry.testing.catalog_space import CatalogSpaceSuite

MEMORY = Path("/dev/shm")  # an example opens a catalog, which waits for the disk twice


class _Lmdb:
    @pytest.fixture
    def catalog(self, clock, policy, tmp_path):
        return LmdbCatalog(tmp_path / "catalog", clock, policy=policy)

    @pytest.fixture
    def again(self, clock, tmp_path):
        return LmdbCatalog(tmp_path / "catalog", clock)


class TestLmdb(_Lmdb, CatalogSuite):
    pass


class TestLmdbEviction(_Lmdb, CatalogEvictionSuite):
    pass


class TestLmdbSpace(_Lmdb, CatalogSpaceSuite):
    pass


class TestLmdbQuotas(_Lmdb, CatalogQuotasSuite):
    pass


class LmdbMachine(CatalogMachine):
    def make(self, clock):
        self.folder = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        return LmdbCatalog(Path(self.folder), clock)

    def teardown(self):
        super().teardown()
        shutil.rmtree(self.folder)


TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("policy", Policy)
def test_a_long_life_is_that_of_the_model(tmp_path, policy):
    pair = Pair(lambda clock: LmdbCatalog(tmp_path, clock, policy=policy), 1, 5, policy)
    said = random_life(pair, seed=1, step_count=20_000, check_every=500)
    assert all(said.values())
    assert (pair.reaches() != {REACH_FIRST}) is (policy is Policy.ADAPTIVE), "nothing came back"
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_long_lives_are_those_of_the_model(tmp_path, seed):
    pair = Pair(lambda clock: LmdbCatalog(tmp_path, clock), seed, segments_max=3 + seed % 9)
    random_life(pair, seed, step_count=20_000, check_every=100)
    pair.close()
