"""What every catalog must do with tenants and quotas: subclass `CatalogQuotasSuite` and give it a
`catalog`. See `testing.catalog`."""

from kvferry.catalog.base import (
    AGE_STEP_S,
    CREATION_S,
    EVERYBODY,
    GRACE_S,
    NO_TENANT,
    Commit,
    Page,
    Quota,
    Refused,
    Share,
    Verdict,
    Want,
)
from kvferry.layout import Address
from kvferry.testing.catalog import (
    CAPACITY_BYTES,
    LEASE_S,
    ROOT,
    SEGMENT_BYTES,
    SEGMENTS_MAX,
    STORE,
    A,
    B,
    CatalogFixtures,
    chain,
    key,
)

T, U = b"t" * 16, b"u" * 16


class CatalogQuotasSuite(CatalogFixtures):
    """Conformance of a `Catalog`, fourth part."""

    def full(self, driver, count_of_t: int, count_of_u: int) -> None:
        """Segments of A, full of one chain for each tenant; those of T are older."""
        for tenant, count in ((T, count_of_t), (U, count_of_u)):
            driver.grow(A, count, tenant)
            driver.store(chain(tenant.hex(), count * A.slot_count), A, tenant)
            driver.clock.advance(AGE_STEP_S)

    def left(self, driver, tenant: bytes) -> int:
        return sum(driver.present(chain(tenant.hex(), SEGMENTS_MAX * A.slot_count)))

    def segments_of(self, catalog, tenant: bytes) -> int:
        counts = {stats.share.tenant: stats.segment_count for stats in catalog.stats().shares}
        return counts.get(tenant, 0)

    def flood(self, driver, space, tenant: bytes, name: str, count: int) -> None:
        """Stores chain after chain, as engines do that never have enough."""
        catalog = driver.catalog
        for index in range(count):
            keys = chain(f"{name} {index}", 3)
            slots = catalog.reserve(space.namespace, 3, LEASE_S, tenant)
            parents = [ROOT, *keys]
            commits = [
                Commit(keys[i], parents[i], i, slot, 0, space.slice_count)
                for i, slot in enumerate(slots)
            ]
            catalog.commit(space.namespace, commits)
            number = catalog.grow(space.namespace, tenant)
            if isinstance(number, int):
                catalog.grown(number)
            self.collect(driver, space, tenant, 3)
            driver.clock.advance(GRACE_S)

    def collect(self, driver, space, tenant: bytes, count: int) -> None:
        swept = driver.catalog.sweep([Want(space.namespace, count, tenant)])
        for emptied in swept.deletable_segments:
            driver.catalog.shrunk(emptied)

    # Shares.

    def test_slots_are_those_of_the_tenants_own_segments(self, driver, catalog):
        driver.grow(A, 1, T)
        assert catalog.reserve(A.namespace, 1, LEASE_S, U) == []
        assert catalog.reserve(A.namespace, 1, LEASE_S) == []
        assert len(catalog.reserve(A.namespace, 9, LEASE_S, T)) == A.slot_count
        assert catalog.segments()[0].tenant == T

    def test_hits_cross_tenants_and_a_page_is_whose_slot_it_is_in(self, driver, catalog):
        driver.grow(A, 1, T)
        driver.grow(A, 1, U)
        driver.store(chain("x", 3), A, T)
        assert driver.present(chain("x", 3)) == [True] * 3
        (slot,) = driver.reserve(1, A, tenant=U)
        assert driver.commit(chain("x", 3)[0], slot) is Verdict.DUPLICATE
        of_t, of_u = catalog.stats().shares
        assert (of_t.share, of_t.page_count) == (Share(A.namespace, T), 3)
        assert (of_t.page_bytes, of_t.segment_count) == (3 * A.slot_bytes, 1)
        assert (of_u.share, of_u.page_count) == (Share(A.namespace, U), 0)

    def test_a_chain_across_tenants_stays_as_young_as_its_end(self, driver, catalog, clock):
        driver.grow(A, 1, T)
        driver.grow(A, 1, U)
        driver.store(chain("x", 2), A, T)
        clock.advance(AGE_STEP_S)
        (slot,) = driver.reserve(1, A, tenant=U)
        catalog.commit(A.namespace, [Commit(key("end"), chain("x", 2)[1], 2, slot, 0, 1)])
        pages = catalog.snapshot().pages
        ages = [pages[A.namespace, name].age for name in (*chain("x", 2), key("end"))]
        assert len(set(ages)) == 1

    def test_without_quotas_tenants_divide_the_store_by_use(self, driver, catalog):
        self.full(driver, 2, 2)
        assert catalog.sweep([Want(A.namespace, 1, U)]).evicted_count == 4
        assert (self.left(driver, T), self.left(driver, U)) == (4, 8)

    def test_segments_that_are_adopted_are_the_tenants(self, driver, catalog):
        page = Page(key("x"), ROOT, 0, Address(7, 0), bytes(16))
        assert catalog.adopt(7, A.namespace, [page], T) == 1
        assert catalog.segments()[7].tenant == T
        assert len(catalog.reserve(A.namespace, 9, LEASE_S, T)) == A.slot_count - 1

    # Maxima.

    def test_who_is_at_its_maximum_gets_no_more(self, driver, catalog):
        catalog.set_quotas([Quota(T, 0, 2)])
        driver.grow(A, 1, T)
        driver.grow(B, 1, T)
        assert catalog.grow(A.namespace, T) is Refused.QUOTA
        assert isinstance(catalog.grow(A.namespace, U), int)
        assert isinstance(catalog.grow(A.namespace), int)
        assert catalog.grow(A.namespace, T) is Refused.BUDGET, "that comes first"
        assert catalog.stats().quota_refused_count == 1

    def test_a_namespace_has_a_maximum_as_well(self, driver, catalog):
        catalog.set_quotas([Quota(A.namespace, 0, 2)])
        driver.grow(A, 1, T)
        driver.grow(A, 1, U)
        assert catalog.grow(A.namespace) is Refused.QUOTA
        assert isinstance(catalog.grow(B.namespace, T), int)

    def test_at_the_maximum_the_own_coldest_pages_go(self, driver, catalog):
        self.full(driver, 2, 1)
        catalog.set_quotas([Quota(U, 0, 1)])
        swept = catalog.sweep([Want(A.namespace, 1, U)])
        assert (swept.evicted_count, swept.quota_evicted_count) == (1, 1)
        assert (self.left(driver, T), self.left(driver, U)) == (8, 3), "T's are older, and stay"
        assert catalog.stats().quota_evicted_count == 1

    def test_what_is_held_ready_does_not_push_out_all_that_a_small_tenant_has(
        self, driver, catalog
    ):
        """Engines want slots by the capacity: half a store would be emptied for them."""
        catalog.set_quotas([Quota(T, 0, 2)])
        self.full(driver, 2, 2)
        assert catalog.sweep([Want(A.namespace, 8, T)]).evicted_count == 2
        catalog.set_quotas([Quota(U, 2)])
        driver.clock.advance(GRACE_S)
        catalog.sweep()
        driver.reserve(2, A, tenant=T)
        assert catalog.sweep([Want(A.namespace, 8, T)]).evicted_count == 2, "U keeps its half"

    def test_a_tenant_at_its_maximum_moves_room_between_its_models(self, driver, catalog, clock):
        catalog.set_quotas([Quota(T, 0, 2)])
        driver.grow(A, 2, T)
        driver.store(chain("x", 8), A, T)
        clock.advance(AGE_STEP_S)
        assert catalog.sweep([Want(B.namespace, 1, T)]).evicted_count == 4
        clock.advance(GRACE_S)
        (number,) = catalog.sweep().deletable_segments
        assert catalog.grow(B.namespace, T) is Refused.QUOTA, "its file is there yet"
        catalog.shrunk(number)
        assert isinstance(catalog.grow(B.namespace, T), int)

    def test_a_lower_maximum_takes_the_coldest_segments(self, driver, catalog, clock):
        driver.grow(A, 3, T)
        for index in range(3):
            driver.store(chain(f"x{index}", 4), A, T)
            clock.advance(AGE_STEP_S)
        catalog.set_quotas([Quota(T, 0, 1)])
        swept = catalog.sweep()
        assert (swept.evicted_count, swept.quota_evicted_count) == (8, 8)
        assert driver.present([chain(f"x{i}", 4)[0] for i in range(3)]) == [False, False, True]

    # Guarantees.

    def test_a_flood_pushes_nobody_below_its_guarantee(self, driver, catalog):
        catalog.set_quotas([Quota(T, 2)])
        self.full(driver, 3, 0)
        self.flood(driver, A, U, "flood", 30)
        assert self.segments_of(catalog, T) == 2
        assert self.left(driver, T) == 2 * A.slot_count
        assert self.segments_of(catalog, U) == SEGMENTS_MAX - 2

    def test_a_flood_of_another_model_does_not_either(self, driver, catalog):
        catalog.set_quotas([Quota(A.namespace, 2)])
        self.full(driver, 3, 0)
        self.flood(driver, B, U, "flood", 30)
        assert self.left(driver, T) == 2 * A.slot_count
        assert self.segments_of(catalog, U) == SEGMENTS_MAX - 2

    def test_what_is_guaranteed_and_not_used_others_use(self, driver, catalog):
        catalog.set_quotas([Quota(T, 3)])
        driver.grow(A, SEGMENTS_MAX, U)

    def test_what_was_lent_comes_back(self, driver, catalog):
        catalog.set_quotas([Quota(T, 2)])
        self.full(driver, 1, 3)
        swept = catalog.sweep([Want(A.namespace, 1, T)])
        assert (swept.evicted_count, swept.quota_evicted_count) == (4, 4)
        assert (self.left(driver, T), self.left(driver, U)) == (4, 8), "T's are older, and stay"

    def test_who_has_its_guarantee_takes_by_age_again(self, driver, catalog):
        catalog.set_quotas([Quota(T, 2)])
        self.full(driver, 2, 2)
        swept = catalog.sweep([Want(A.namespace, 1, T)])
        assert (swept.evicted_count, swept.quota_evicted_count) == (1, 0)
        assert (self.left(driver, T), self.left(driver, U)) == (7, 8)

    def test_who_lent_keeps_out_of_what_is_to_come_back(self, driver, catalog, clock):
        catalog.set_quotas([Quota(T, 2)])
        self.full(driver, 1, 3)
        clock.advance(CREATION_S)
        self.collect(driver, A, T, 1)
        clock.advance(GRACE_S)
        self.collect(driver, A, T, 1)
        assert self.segments_of(catalog, U) == 2
        assert catalog.grow(A.namespace, U) is Refused.QUOTA
        assert isinstance(catalog.grow(A.namespace, T), int)

    def test_who_wants_no_more_lends_again(self, driver, catalog, clock):
        catalog.set_quotas([Quota(T, 2)])
        self.full(driver, 1, 3)
        self.collect(driver, A, T, 1)
        clock.advance(CREATION_S)
        self.collect(driver, A, U, 0)
        assert isinstance(catalog.grow(A.namespace, U), int)

    def test_two_that_flood_both_get_their_guarantee(self, driver, catalog):
        catalog.set_quotas([Quota(T, 2), Quota(U, 2)])
        for turn in range(12):
            self.flood(driver, A, U, f"u {turn}", 3)
            self.flood(driver, A, T, f"t {turn}", 1)
        assert self.segments_of(catalog, T) == self.segments_of(catalog, U) == 2

    def test_a_smaller_store_takes_what_nobody_is_guaranteed(self, driver, catalog):
        catalog.set_quotas([Quota(T, 2)])
        self.full(driver, 2, 2)
        catalog.close()
        catalog.open(STORE, 2 * SEGMENT_BYTES, SEGMENT_BYTES)
        catalog.sweep()
        assert (self.left(driver, T), self.left(driver, U)) == (8, 0), "T's are older, and stay"
        driver.clock.advance(GRACE_S)
        self.collect(driver, A, T, 0)

    # Time to live.

    def test_what_was_not_used_for_so_long_goes(self, driver, catalog, clock):
        catalog.set_quotas([Quota(T, ttl_s=3 * AGE_STEP_S)])
        self.full(driver, 1, 1)
        clock.advance(AGE_STEP_S)
        assert catalog.sweep().lapsed_count == 0
        clock.advance(AGE_STEP_S)
        catalog.touch(A.namespace, chain(T.hex(), 2))
        clock.advance(AGE_STEP_S)
        swept = catalog.sweep()
        assert (swept.lapsed_count, swept.evicted_count, swept.quota_evicted_count) == (2, 2, 0)
        assert driver.present(chain(T.hex(), 4)) == [True, True, False, False]
        assert (self.left(driver, U), catalog.stats().lapsed_count) == (4, 2)
        assert catalog.snapshot().recalls[A.namespace][1:] == (0, 0), "it teaches nothing"

    def test_the_shortest_time_counts(self, driver, catalog, clock):
        catalog.set_quotas(
            [Quota(EVERYBODY, ttl_s=5 * AGE_STEP_S), Quota(A.namespace, ttl_s=900.0), Quota(U)]
        )
        self.full(driver, 1, 1)
        clock.advance(4 * AGE_STEP_S)
        assert catalog.sweep().lapsed_count == 4
        assert (self.left(driver, T), self.left(driver, U)) == (0, 4)
        clock.advance(AGE_STEP_S)
        assert catalog.sweep().lapsed_count == 4

    # What is set.

    def test_quotas_are_replaced_by_the_next(self, driver, catalog):
        catalog.set_quotas([Quota(T, 0, 1), Quota(A.namespace, 0, 1)])
        catalog.set_quotas([Quota(T, 0, 2)])
        driver.grow(A, 2, T)
        assert catalog.grow(A.namespace, T) is Refused.QUOTA
        assert isinstance(catalog.grow(A.namespace, NO_TENANT), int)

    def test_quotas_and_claims_outlive_a_restart(self, driver, catalog, again):
        catalog.set_quotas([Quota(T, 2, 3)])
        self.full(driver, 1, 3)
        catalog.sweep([Want(A.namespace, 1, T)])
        catalog.set_quotas([Quota(T, 2, 4, 600.0), Quota(EVERYBODY, ttl_s=900.0)])
        before = catalog.snapshot().quotas
        assert before[T][:3] == (2, 4, 600.0)
        assert before[T][3] > 0.0, "the claim stands"
        catalog.close()
        again.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        assert again.snapshot().quotas == before
        again.close()
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
