"""Slots, demand, costs, origins and quarantine: small books that must not be wrong by one."""

from kvferry.catalog.base import Slot
from kvferry.layout import Address
from kvferry.offload.scheduler.cost import PREFILL_TOKENS_MIN, TRIAL_EVERY_S, CostModel
from kvferry.offload.scheduler.lookup import PIECE_CHUNKS, REST_S, pieces
from kvferry.offload.scheduler.origin import Origins
from kvferry.offload.scheduler.quarantine import Quarantine
from kvferry.offload.space.room import Demand, SlotPool, pack, unpack
from kvferry.testing.clock import ManualClock
from tests.offload.parts import make_part


def slots(count: int) -> list[Slot]:
    return [Slot(Address(1, number), bytes([number]) * 16) for number in range(count)]


def test_slots_are_handed_out_once_oldest_first():
    pool = SlotPool()
    pool.add(pack(slots(3)), sure_until_s=10.0)
    packed, until_s = pool.take(2, needed_until_s=5.0)
    assert (unpack(packed), until_s) == (slots(2), 10.0)
    assert (len(pool), pool.take_used_count(), pool.take_used_count()) == (1, 2, 0)
    assert unpack(pool.drain()) == slots(3)[2:]
    assert len(pool) == 0
    assert pool.take(1, 0.0) is None


def test_a_reservation_gives_no_more_than_it_has_and_the_next_one_goes_on():
    pool = SlotPool()
    pool.add(pack(slots(4)[:1]), sure_until_s=10.0)
    pool.add(pack(slots(4)[1:]), sure_until_s=20.0)
    found = [pool.take(2, needed_until_s=5.0) for _ in range(3)]
    assert [unpack(packed) for packed, _ in found] == [slots(4)[:1], slots(4)[1:3], slots(4)[3:]]
    assert [until_s for _, until_s in found] == [10.0, 20.0, 20.0]
    assert (len(pool), pool.take_used_count()) == (0, 4)


def test_a_slot_that_may_end_too_early_is_not_used():
    pool = SlotPool()
    pool.add(pack(slots(3)), sure_until_s=10.0)
    pool.add(pack([Slot(Address(2, 0), b"n" * 16)]), sure_until_s=20.0)
    pool.take(1, needed_until_s=5.0)
    packed, until_s = pool.take(3, needed_until_s=10.5)
    assert (unpack(packed), until_s) == ([Slot(Address(2, 0), b"n" * 16)], 20.0)
    assert len(pool) == 0
    assert unpack(pool.take_discarded()) == slots(3)[1:]


def test_demand_covers_what_is_in_sight_and_what_is_in_grace():
    demand = Demand(ahead_count=4, count_max=100, grace_s=10.0)
    assert demand.wanted_count(0.0, 0) == 4
    assert demand.wanted_count(0.0, 3) == 7
    demand.used(20, 1.0)
    assert demand.wanted_count(10.0, 3) == 23
    assert demand.wanted_count(11.5, 3) == 7
    assert demand.wanted_count(12.0, 1000) == 100


def model(load_tokens_per_s: float, prefill_tokens_per_s: float) -> CostModel:
    cost = CostModel(True)
    cost.saw_load(int(load_tokens_per_s), 1.0)
    cost.saw_step(int(prefill_tokens_per_s), 1.0)
    return cost


def test_a_load_pays_where_it_is_faster_than_computing():
    assert model(2000, 1000).pays()
    assert not model(1000, 2000).pays()


def test_a_store_is_tried_while_its_speed_is_unknown_or_too_low():
    cost = CostModel(True)
    assert [cost.wants_trial(now_s) for now_s in (1.0, 1.1, TRIAL_EVERY_S + 2)] == [
        True,
        False,
        True,
    ]
    cost.saw_load(1000, 1.0)
    cost.saw_step(2000, 1.0)
    assert not cost.wants_trial(100.0)
    assert not any(cost.pays() for _ in range(100))
    assert [cost.wants_trial(now_s) for now_s in (101.0, 102.0, 200.0)] == [True, False, False]
    for _ in range(20):
        cost.saw_load(4000, 1.0)
    assert cost.pays()


def test_nobody_tries_a_store_whose_loads_are_all_taken():
    assert not CostModel(False).wants_trial(1.0)


def test_short_steps_say_nothing_about_prefill():
    cost = model(1000, 0)
    cost.saw_step(PREFILL_TOKENS_MIN - 1, 0.001)
    assert cost.pays()
    cost.saw_step(PREFILL_TOKENS_MIN, 0.001)
    assert not cost.pays()


def test_only_what_was_allocated_since_is_ours():
    origins = Origins()
    origins.allocated([1, 2])
    origins.agree((make_part(),))
    origins.allocated([3, 4])
    assert not origins.are_ours([[1, 2]], 8)
    assert not origins.are_ours([[3, 2]], 8)
    assert origins.are_ours([[3, 4]], 8)
    assert origins.are_ours([[3, 4, 1]], 11)  # the third block is not full


def test_before_the_ranks_agree_nothing_is_ours():
    """A sibling connector may have loaded what a request finds in its first blocks: one that was
    admitted then stores nothing later either."""
    origins = Origins()
    assert not origins.are_ours([[1, 2]], 8)
    origins.allocated([1, 2])
    origins.disown([[1, 2]], 0, 8)
    assert not origins.are_ours([[1, 2]], 8)


def test_a_clean_block_on_a_foreign_one_is_no_clean_prefix():
    """A prefix cache puts blocks of different requests together."""
    origins = Origins()
    origins.agree((make_part(),))
    origins.allocated([1, 2, 3])
    origins.disown([[1, 2, 3]], 0, 4)
    assert not origins.are_ours([[1, 2, 3]], 12)
    assert origins.are_ours([[0, 2, 3]], 12)
    origins.allocated([1])
    assert origins.are_ours([[1, 2, 3]], 12)


def test_after_a_reset_nothing_is_ours():
    origins = Origins()
    origins.agree((make_part(),))
    origins.allocated([1, 2])
    origins.forget()
    assert not origins.are_ours([[1, 2]], 8)
    assert origins.are_ours([[1, 2]], 0)


def test_quarantine_ends_by_itself():
    clock = ManualClock()
    quarantine = Quarantine(clock, ttl_s=10.0)
    quarantine.add(b"a")
    clock.advance(6.0)
    quarantine.add(b"b")
    assert sorted(quarantine.among({b"a": 1, b"b": 2, b"c": 3})) == [1, 2]
    clock.advance(5.0)
    assert b"a" not in quarantine
    assert quarantine.among({b"a": 1, b"b": 2}) == [2]
    quarantine.add(b"a")
    assert b"a" in quarantine
    assert quarantine.version == 3


def test_a_long_lookup_rests_between_its_pieces():
    """Else the engine's thread gets no turn for milliseconds."""
    clock = ManualClock()
    times_s = [(piece, clock.now_s() - 1000.0) for piece in pieces(2 * PIECE_CHUNKS + 1, clock)]
    assert [piece for piece, _ in times_s] == [range(64), range(64, 128), range(128, 129)]
    assert [round(time_s / REST_S) for _, time_s in times_s] == [0, 1, 2]
    assert list(pieces(PIECE_CHUNKS, clock)) == [range(PIECE_CHUNKS)]
    assert round((clock.now_s() - 1000.0) / REST_S) == 2
