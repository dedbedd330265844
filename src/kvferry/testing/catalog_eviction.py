"""What every catalog must do by each policy of eviction: subclass `CatalogEvictionSuite` and give
it a `catalog` that keeps the fixture `policy`."""

import pytest

from kvferry.catalog.base import AGE_STEP_S, GRACE_S, USES_MAX, Policy, Want
from kvferry.catalog.eviction import REACH_FIRST
from kvferry.catalog.snapshot import Snapshot
from kvferry.testing.catalog import SEGMENTS_MAX, A, CatalogFixtures, chain


class CatalogEvictionSuite(CatalogFixtures):
    """Conformance of a `Catalog`, third part."""

    @pytest.fixture(params=Policy)
    def policy(self, request) -> Policy:
        return request.param

    def uses(self, snapshot: Snapshot, keys: list[bytes]) -> list[int]:
        return [snapshot.pages[A.namespace, key].uses for key in keys]

    def scanned(self, driver, catalog, clock) -> None:
        """Four pages that were used again, then a scan of twelve that nobody asks for again."""
        driver.grow(A, SEGMENTS_MAX)
        driver.store(chain("hot", 4))
        clock.advance(AGE_STEP_S)
        catalog.touch(A.namespace, chain("hot", 4))
        clock.advance(AGE_STEP_S)
        driver.store(chain("scan", 12))
        clock.advance(5 * AGE_STEP_S)

    def make_room(self, catalog, clock, count: int) -> None:
        catalog.sweep([Want(A.namespace, count)])
        clock.advance(GRACE_S)
        catalog.sweep()

    def test_a_scan_takes_the_place_of_what_is_used_by_lru_only(
        self, driver, catalog, clock, policy
    ):
        self.scanned(driver, catalog, clock)
        catalog.sweep([Want(A.namespace, 4)])
        assert driver.present(chain("hot", 4)) == [policy is Policy.ADAPTIVE] * 4
        assert sum(driver.present(chain("scan", 12))) == (8 if policy is Policy.ADAPTIVE else 12)

    def test_leaves_go_first_by_any_policy(self, driver, catalog, clock):
        self.scanned(driver, catalog, clock)
        for _ in range(16):
            catalog.evict(A.namespace, [])
            free_count = 16 - sum(driver.present(chain("hot", 4) + chain("scan", 12)))
            catalog.sweep([Want(A.namespace, min(7, free_count + 1))])
            for name, count in (("hot", 4), ("scan", 12)):
                present = driver.present(chain(name, count))
                assert present == sorted(present, reverse=True), "a hole in a prefix"
            clock.advance(GRACE_S)
            catalog.sweep()
            catalog.reserve(A.namespace, 1, 10_000.0)

    def test_uses_are_counted_once_a_step(self, driver, catalog, clock):
        driver.grow()
        driver.store(chain("x", 4))
        for _ in range(3):
            catalog.touch(A.namespace, chain("x", 2))
        assert self.uses(catalog.snapshot(), chain("x", 4)) == [1, 1, 1, 1]
        for _ in range(USES_MAX + 3):
            clock.advance(AGE_STEP_S)
            catalog.touch(A.namespace, chain("x", 2))
        assert self.uses(catalog.snapshot(), chain("x", 4)) == [USES_MAX, USES_MAX, 1, 1]

    def test_a_page_that_comes_back_is_remembered_by_adaptive(self, driver, catalog, clock, policy):
        driver.grow(A, SEGMENTS_MAX)
        driver.store(chain("x", 16))
        clock.advance(AGE_STEP_S)
        catalog.touch(A.namespace, chain("x", 16))
        self.make_room(catalog, clock, 2)
        assert driver.present(chain("x", 16)) == [True] * 14 + [False] * 2
        before = catalog.snapshot().recalls[A.namespace]
        driver.store(chain("x", 16)[14:])
        after = catalog.snapshot()
        is_adaptive = policy is Policy.ADAPTIVE
        assert self.uses(after, chain("x", 16)[14:]) == [3 if is_adaptive else 1] * 2
        assert before == (REACH_FIRST, 0, 2 if is_adaptive else 0)
        reach, once, again = after.recalls[A.namespace]
        assert (once, again) == (0, 0)
        assert (reach > REACH_FIRST) is is_adaptive, "what was used again should have been kept"

    def test_an_eviction_goes_on_to_the_high_mark(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        driver.store(chain("x", 16))
        assert catalog.sweep([Want(A.namespace, 8)]).evicted_count == 9
        clock.advance(GRACE_S)
        assert catalog.sweep([Want(A.namespace, 8)]).evicted_count == 0
        driver.reserve(1)
        assert catalog.sweep([Want(A.namespace, 8)]).evicted_count == 0, (
            "it is not below the low mark"
        )
        driver.reserve(1)
        assert catalog.sweep([Want(A.namespace, 8)]).evicted_count == 2

    def test_slots_under_lease_are_not_taken(self, driver, catalog, clock):
        driver.grow(A, SEGMENTS_MAX)
        driver.store(chain("x", 4))
        slots = driver.reserve(12, lease_s=1000.0)
        assert catalog.sweep([Want(A.namespace, 16)]).evicted_count == 4
        clock.advance(GRACE_S)
        catalog.sweep([Want(A.namespace, 16)])
        assert set(catalog.snapshot().reserved) == {slot.address for slot in slots}
        assert len(catalog.reserve(A.namespace, 16, 1000.0)) == 4
