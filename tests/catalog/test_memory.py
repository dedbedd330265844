"""The readable reference keeps the contract."""

import pytest

from kvferry.catalog.memory import MemoryCatalog
from kvferry.testing.catalog import CatalogSuite
from kvferry.testing.catalog_eviction import CatalogEvictionSuite
from kvferry.testing.catalog_quotas import CatalogQuotasSuite
from kvferry.testing.catalog_space import CatalogSpaceSuite


class _Memory:
    @pytest.fixture
    def catalog(self, clock, policy):
        return MemoryCatalog(clock, policy=policy)


class TestMemory(_Memory, CatalogSuite):
    pass


class TestMemoryEviction(_Memory, CatalogEvictionSuite):
    pass


class TestMemorySpace(_Memory, CatalogSpaceSuite):
    pass


class TestMemoryQuotas(_Memory, CatalogQuotasSuite):
    pass
