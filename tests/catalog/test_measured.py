"""An operator whose catalog is slow or failing must see which call it is."""

import pytest

from kvferry.catalog.base import Catalog
from kvferry.catalog.measured import MeasuredCatalog
from kvferry.catalog.memory import MemoryCatalog
from kvferry.errors import UnavailableError
from kvferry.metric_table import CATALOG_VERBS
from kvferry.metrics import Metrics
from kvferry.testing.catalog import CatalogSuite
from kvferry.testing.clock import ManualClock

SECONDS = "kvferry_catalog_call_seconds"
ERRORS = "kvferry_catalog_errors_total"


class TestMeasured(CatalogSuite):
    """Measuring changes nothing."""

    @pytest.fixture
    def catalog(self, clock):
        return MeasuredCatalog(MemoryCatalog(clock), clock, Metrics())


class Slow(MemoryCatalog):
    def __init__(self, clock):
        super().__init__(clock)
        self.clock = clock

    def sweep(self, wanted=()):
        self.clock.advance(2.0)
        return super().sweep(wanted)

    def grow(self, namespace):
        raise UnavailableError("test.down", "down")


def test_each_call_is_counted_under_its_verb():
    clock, metrics = ManualClock(), Metrics()
    catalog = MeasuredCatalog(Slow(clock), clock, metrics)
    catalog.open(bytes(16), 1 << 20, 1 << 16)
    catalog.sweep()
    with pytest.raises(UnavailableError):
        catalog.grow(bytes(32))
    counted = metrics.snapshot()
    assert counted[ERRORS] == {"grow": 1}
    totals = {
        verb: sum(total for _, total in buckets) for verb, buckets in counted[SECONDS].items()
    }
    assert totals == {"open": 0, "sweep": 2.0, "grow": 0}


def test_every_verb_of_the_contract_is_measured():
    verbs = {name for name in vars(Catalog) if not name.startswith("_")} - {"close"}
    assert verbs == set(CATALOG_VERBS)
