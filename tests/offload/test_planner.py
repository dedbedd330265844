"""The scheduler half: what is asked, loaded and stored, and for how long anything waits."""

from itertools import chain

import msgspec
import pytest

from kvferry.catalog.base import Commit
from kvferry.offload.base import Report
from kvferry.offload.scheduler import due, planner
from kvferry.offload.space.room import space_of, unpack
from tests.offload.parts import CONFIG, Bench, PlainRequest, make_part

TOKENS = list(range(100, 132))  # four chunks of 8


@pytest.fixture
def bench():
    bench = Bench()
    bench.agree()
    return bench


def publish(bench: Bench, plan) -> None:
    """What workers do with a plan's stores, in no time."""
    for store in (*plan.stores, *plan.late_stores):
        part = bench.parts[store.span.part_index]
        commits = [
            Commit(
                chunk.key,
                chunk.parent,
                chunk.chunk_index,
                unpack(store.span.slots)[index],
                0,
                part.slice_count,
            )
            for index, chunk in enumerate(store.span.chunks())
        ]
        bench.catalog.commit(plan.parts[store.span.part_index][2], commits)


def stored(plan) -> list[int]:
    """Chunks that a plan stores."""
    spans = [store.span for store in (*plan.stores, *plan.late_stores)]
    return [chunk.chunk_index for span in spans for chunk in span.chunks()]


def test_what_one_request_stores_the_next_one_loads(bench):
    bench.begin("a", TOKENS)
    publish(bench, bench.admit("a", 0, 32))
    bench.begin("b", [*TOKENS, 1])
    assert bench.planner.match("b", 0, 33) == 32
    bench.planner.allocated("b", bench.tables["b"], 32)
    (load,) = bench.step().loads
    assert (load.request_id, load.start_token, load.end_token) == ("b", 0, 32)
    assert load.spans[0].blocks == tuple(bench.tables["b"][0][:8])


def test_only_accepted_and_computed_tokens_are_stored(bench):
    request = bench.begin("a", TOKENS[:15])
    assert stored(bench.admit("a", 0, 15)) == [0]
    plan = bench.step({"a": (15, 4)})  # guesses beyond what is known
    assert stored(plan) == []
    request.tokens = TOKENS[:17]
    assert stored(bench.step({"a": (16, 1)})) == [1]


def test_a_finished_request_stores_all_but_its_last_token(bench):
    request = bench.begin("a", TOKENS[:15])
    bench.admit("a", 0, 15)
    request.tokens = TOKENS[:16]
    bench.planner.finished("a", bench.tables["a"])
    assert stored(bench.step()) == []
    request = bench.begin("b", TOKENS[16:31])
    bench.admit("b", 0, 15)
    bench.step({"b": (15, 1)})
    request.tokens = TOKENS[16:33]
    request.tokens.append(7)
    bench.planner.finished("b", bench.tables["b"])
    assert stored(bench.step()) == [1]
    assert bench.planner.is_idle()


def test_a_request_that_was_preempted_owns_nothing(bench):
    """Its blocks are new ones for a load when it is aborted: nothing in them is computed yet."""
    bench.catalog.close()  # no slots while it computes
    bench.begin("a", TOKENS)
    assert stored(bench.admit("a", 0, 32)) == []
    bench.step(preempted=frozenset(["a"]))
    bench.catalog.open(bench.facts.store_id, bench.facts.capacity_bytes, bench.facts.segment_bytes)
    bench.clock.advance(5.0)
    bench.step()
    bench.background()
    bench.step()
    bench.planner.finished("a", bench.tables["a"])
    assert stored(bench.step()) == []


def test_what_a_sibling_loaded_is_not_stored_nor_what_hangs_on_it(bench):
    bench.begin("a", TOKENS)
    bench.planner.match("a", 0, 32)
    assert stored(bench.admit("a", 8, 24)) == []  # 8 tokens came from elsewhere
    bench.tables["b"] = [[*bench.tables["a"][0][:4], 90, 91, 92, 93]]
    bench.planner.on_new_request(PlainRequest("b", [*TOKENS[:16], *range(16)]))
    bench.background()
    bench.planner.match("b", 16, 32)
    assert stored(bench.step({"b": (16, 16)}, frozenset([90, 91, 92, 93]))) == []


def test_nor_is_it_where_its_request_is_not_cacheable(bench):
    request = PlainRequest("a", TOKENS)
    request.is_cacheable = False
    bench.planner.on_new_request(request)
    bench.tables["a"] = [list(range(1, 9))]
    bench.planner.match("a", 0, 32)
    assert stored(bench.admit("a", 8, 24)) == []  # 8 tokens came from elsewhere
    bench.begin("b", [*TOKENS[:16], *range(16)])
    bench.tables["b"] = [[1, 2, 3, 4, 90, 91, 92, 93]]
    bench.planner.match("b", 16, 32)
    assert stored(bench.step({"b": (16, 16)}, frozenset([90, 91, 92, 93]))) == []


def decode(bench: Bench, request: PlainRequest, first: int, end: int) -> list[list[int]]:
    """Steps that compute the tokens [first, end) one by one. Which chunks each plan stores."""
    plans = []
    for computed in range(first, end):
        request.tokens = TOKENS[: computed + 1]
        plans.append(stored(bench.step({request.request_id: (computed, 1)})))
    return plans


def begin_of_many(bench: Bench, monkeypatch, together_tokens: int) -> None:
    monkeypatch.setattr(due, "MANY_REQUESTS", 1)
    monkeypatch.setattr(planner, "TOGETHER_TOKENS", together_tokens)
    bench.agree()


@pytest.fixture
def alone():
    """A bench whose ranks have not agreed yet."""
    return Bench()


def test_where_many_decode_their_chunks_are_stored_a_few_steps_later_at_most(alone, monkeypatch):
    bench = alone
    begin_of_many(bench, monkeypatch, 8)
    request = bench.begin("a", TOKENS)
    request.tokens = TOKENS[:9]
    plans = [stored(bench.admit("a", 0, 9)), *decode(bench, request, 9, 28)]
    for chunk_index, complete_in in enumerate((0, 7, 15)):
        (planned_in,) = (index for index, plan in enumerate(plans) if chunk_index in plan)
        assert complete_in <= planned_in < complete_in + due.TOGETHER_STEPS


def test_where_many_decode_short_chunks_are_stored_together(alone, monkeypatch):
    """None is left out, and none waits longer than that."""
    begin_of_many(alone, monkeypatch, 16)
    request = alone.begin("a", TOKENS)
    request.tokens = TOKENS[:9]
    plans = [stored(alone.admit("a", 0, 9)), *decode(alone, request, 9, 28)]

    assert [plan for plan in plans if plan] == [[0], [1, 2]]
    assert 15 <= plans.index([1, 2]) < 15 + due.TOGETHER_STEPS


def test_what_is_not_planned_yet_when_one_of_many_ends_is_stored(alone, monkeypatch):
    bench = alone
    begin_of_many(bench, monkeypatch, 16)
    for end in range(17, 28):  # planned or not: nothing is lost, nothing stored twice
        name = f"request {end}"
        request = bench.begin(name, [end, *TOKENS[1:]])
        request.tokens = request.tokens[:9]
        plans = [stored(bench.admit(name, 0, 9))]
        for computed in range(9, end):
            request.tokens = [end, *TOKENS[1 : computed + 1]]
            plans.append(stored(bench.step({name: (computed, 1)})))
        request.tokens.append(7)
        bench.planner.finished(name, bench.tables[name])
        plans.append(stored(bench.step()))
        assert list(chain(*plans)) == list(range(end // 8))


def test_a_windows_blocks_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(due, "MANY_REQUESTS", 1)
    bench = Bench(parts=(make_part(window_tokens=16),))
    bench.agree()
    bench.begin("a", TOKENS)
    assert stored(bench.admit("a", 0, 32)) == [0, 1, 2, 3]


class Counted(dict):
    """A dict that counts how often it is asked."""

    asked_count = 0

    def __getitem__(self, key):
        self.asked_count += 1
        return super().__getitem__(key)


def test_without_slots_a_step_costs_what_it_costs_with_them(bench):
    """A full disk must not make every step look at every request."""
    bench.catalog.close()
    request = bench.begin("a", TOKENS)
    bench.tables = Counted(bench.tables)
    request.tokens = TOKENS[:9]
    assert stored(bench.admit("a", 0, 9)) == []
    asked_count = bench.tables.asked_count
    assert decode(bench, request, 9, 15) == [[]] * 6
    assert bench.tables.asked_count == asked_count

    bench.catalog.open(bench.facts.store_id, bench.facts.capacity_bytes, bench.facts.segment_bytes)
    bench.clock.advance(5.0)
    bench.step()
    bench.background()
    assert list(chain(*decode(bench, request, 15, 18))) == [0, 1]


def test_without_a_catalog_a_step_costs_what_it_costs_with_one(bench):
    request = PlainRequest("a", TOKENS)
    bench.planner.on_new_request(request)  # its lookup never runs
    bench.clock.advance(5.0)
    bench.tables = Counted(a=[list(range(1, 9))])
    request.tokens = TOKENS[:9]
    assert bench.planner.match("a", 0, 9) == 0
    bench.admit("a", 0, 9)
    asked_count = bench.tables.asked_count
    decode(bench, request, 9, 28)
    assert bench.tables.asked_count == asked_count


def test_a_reset_makes_a_namespace_that_nobody_has(bench):
    bench.begin("a", TOKENS)
    publish(bench, bench.admit("a", 0, 32))
    before = bench.step().parts
    bench.planner.finished("a", bench.tables["a"])
    bench.planner.reset()
    plan = bench.step()
    assert plan.drop_stores
    assert (stored(plan), plan.parts == before) == ([], False)
    bench.begin("b", TOKENS)
    assert bench.planner.match("b", 0, 32) == 0
    assert not bench.step().drop_stores


@pytest.mark.parametrize("is_done", [False, True])
def test_slots_on_their_way_are_given_back_at_a_reset(bench, is_done):
    """They were nobody's until their lease ended: up to a quarter of the store, at each update of
    weights."""
    bench.planner.on_new_request(PlainRequest("a", TOKENS))
    if is_done:
        bench.background()
    bench.planner.reset()
    bench.background()
    snapshot = bench.catalog.snapshot()
    namespaces = {snapshot.segments[address.segment].namespace for address in snapshot.reserved}
    assert bench.parts[0].namespace not in namespaces


def test_slots_on_their_way_are_given_back_at_the_end(bench):
    bench.planner.on_new_request(PlainRequest("a", TOKENS))
    bench.background()
    bench.planner.close()
    bench.background()
    assert not bench.catalog.snapshot().reserved


def test_a_running_request_stores_nothing_after_a_reset(bench):
    bench.begin("a", TOKENS)
    bench.admit("a", 0, 8)
    bench.planner.reset()
    bench.background()
    bench.step()
    assert stored(bench.step({"a": (8, 24)})) == []


def test_an_answer_is_waited_for_until_its_deadline(bench):
    bench.planner.on_new_request(PlainRequest("a", TOKENS))
    assert bench.planner.match("a", 0, 32) is None
    bench.clock.advance(CONFIG.lookup_deadline_s - 0.01)
    assert bench.planner.match("a", 0, 32) is None
    bench.clock.advance(0.02)
    assert bench.planner.match("a", 0, 32) == 0
    assert bench.metrics.value("kvferry_lookups_total", outcome="late") == 1


def test_who_finds_no_room_lets_others_by(bench):
    """vLLM before 0.32 stops at the first request that does not fit, and never comes to those whose
    loads have ended: they kept the blocks for ever."""
    bench.begin("large", list(range(40)))
    answer = bench.planner.match("large", 0, 40)
    assert answer is not None
    bench.step()  # nothing ran, and it was not admitted
    assert bench.planner.match("large", 0, 40) is None
    bench.step()
    assert bench.planner.match("large", 0, 40) == answer


def test_who_is_admitted_or_waits_for_a_running_one_is_answered(bench):
    bench.begin("runs", list(range(8)))
    bench.begin("large", list(range(40)))
    bench.planner.match("runs", 0, 8)
    bench.planner.allocated("runs", bench.tables["runs"], 0)
    bench.step()
    assert bench.planner.match("large", 0, 40) is not None
    bench.step({"runs": (0, 8)})
    assert bench.planner.match("large", 0, 40) is not None


def test_ranks_are_waited_for_once():
    bench = Bench()
    bench.planner.on_new_request(PlainRequest("a", TOKENS))
    assert bench.planner.match("a", 0, 32) is None
    bench.clock.advance(CONFIG.lookup_deadline_s)
    assert bench.planner.match("a", 0, 32) == 0
    bench.planner.on_new_request(PlainRequest("b", TOKENS))
    assert bench.planner.match("b", 0, 32) == 0


def test_a_stale_answer_is_asked_again(bench):
    bench.begin("a", TOKENS)
    publish(bench, bench.admit("a", 0, 32))
    bench.begin("b", [*TOKENS, 1])
    assert bench.planner.match("b", 0, 33) == 32
    bench.clock.advance(CONFIG.grace_s)
    assert bench.planner.match("b", 0, 33) is None
    bench.background()
    assert bench.planner.match("b", 0, 33) == 32


def test_a_key_that_failed_is_not_offered_for_a_while_and_stored_again(bench):
    bench.begin("a", TOKENS)
    plan = bench.admit("a", 0, 32)
    publish(bench, plan)
    bench.begin("b", [*TOKENS, 1])
    assert bench.planner.match("b", 0, 33) == 32
    bench.planner.allocated("b", bench.tables["b"], 32)
    (load,) = bench.step(new_blocks=frozenset(bench.tables["b"][0])).loads
    bad = load.spans[0].keys[32:64]
    bench.planner.receive(Report(failed_keys=((plan.parts[0][2], bad),)))
    again = bench.step({"b": (8, 25)})
    assert stored(again) == [1]
    bench.begin("c", [*TOKENS, 2])
    assert bench.planner.match("c", 0, 33) == 8
    bench.clock.advance(CONFIG.failed_key_ttl_s + 0.1)
    bench.planner.match("c", 0, 33)
    bench.background()
    assert bench.planner.match("c", 0, 33) == 32


def test_several_groups_leave_a_token_to_compute():
    bench = Bench(parts=(make_part(), make_part(group_index=1, window_tokens=16)))
    bench.agree()
    bench.begin("a", TOKENS)
    publish(bench, bench.admit("a", 0, 32))
    bench.begin("b", TOKENS)
    assert bench.planner.match("b", 0, 32) == 24


def test_what_is_not_cacheable_is_neither_looked_up_nor_stored(bench):
    request = PlainRequest("a", TOKENS)
    request.is_cacheable = False
    bench.planner.on_new_request(request)
    bench.tables["a"] = [list(range(1, 9))]
    assert bench.planner.match("a", 0, 32) == 0
    assert stored(bench.admit("a", 0, 32)) == []
    bench.planner.finished("a", bench.tables["a"])
    assert stored(bench.step()) == []


def test_what_nothing_names_is_neither_looked_up_nor_stored(bench):
    """Its adapter's files are away or have changed: keys that nobody has again fill the store."""
    request = PlainRequest("a", TOKENS)
    request.can_be_named = False
    bench.planner.on_new_request(request)
    bench.background()
    bench.step()
    bench.tables["a"] = [list(range(1, 9))]
    assert bench.planner.match("a", 0, 32) == 0
    assert stored(bench.admit("a", 0, 32)) == []
    bench.planner.finished("a", bench.tables["a"])
    assert stored(bench.step()) == []
    assert bench.metrics.value("kvferry_lookups_total", outcome="skipped") == 1


def test_slots_that_are_too_old_to_be_used_are_not_kept_from_others(bench):
    bench.begin("a", TOKENS)
    bench.planner.finished("a")
    (before,) = bench.catalog.stats().spaces
    bench.clock.advance(CONFIG.reservation_lease_s - CONFIG.store_deadline_s + 1)
    bench.step()
    bench.background()
    (after,) = bench.catalog.stats().spaces
    assert before.reserved_count > CONFIG.reserve_ahead_count
    assert after.reserved_count == CONFIG.reserve_ahead_count


def test_requests_that_store_nothing_leave_no_demand_behind(bench):
    bench.begin("first", TOKENS)
    publish(bench, bench.admit("first", 0, 32))
    bench.planner.finished("first")
    bench.clock.advance(CONFIG.grace_s + 1)  # what was used lately counts as well
    for round_ in range(5):
        name = str(round_)
        bench.begin(name, TOKENS)
        assert bench.planner.match(name, 0, 32) == 32
        bench.planner.allocated(name, bench.tables[name], 32)
        bench.step()
        bench.planner.finished(name)
        bench.background()
    (space,) = bench.catalog.stats().spaces
    assert space.reserved_count <= CONFIG.reserve_ahead_count + len(TOKENS) // 8


def test_an_idle_engine_does_not_evict_what_others_use(bench):
    (part,) = bench.parts
    other = msgspec.structs.replace(part, namespace=b"o" * 32)
    for known in (part, other):
        bench.catalog.attach(space_of(known, bench.facts))
    count = 0
    while isinstance(segment := bench.catalog.grow(other.namespace), int):
        bench.catalog.grown(segment)
        for slot in bench.catalog.reserve(other.namespace, 100, 60.0):
            key = count.to_bytes(32, "big")
            bench.catalog.commit(other.namespace, [Commit(key, bytes(32), 0, slot, 0, 2)])
            count += 1
    bench.planner.on_new_request(PlainRequest("a", TOKENS))
    bench.planner.finished("a")
    for _ in range(3):
        bench.clock.advance(60)
        bench.planner.tend()
    assert sum(space.page_count for space in bench.catalog.stats().spaces) == count


def test_a_plan_survives_its_way_to_the_worker(bench):
    bench.begin("a", TOKENS)
    plan = bench.admit("a", 0, 32)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=type(plan))
    assert decoded == plan
    assert stored(decoded) == [0, 1, 2, 3]


def test_the_first_request_after_a_long_rest_is_stored(bench):
    """By then the slots reserved ahead are too old: it waits for others, as the first one did."""
    bench.step()
    bench.background()
    bench.step()
    bench.clock.advance(2 * CONFIG.reservation_lease_s)
    request = PlainRequest("a", TOKENS)
    bench.planner.on_new_request(request)
    assert bench.planner.match("a", 0, 32) is None
    bench.background()
    bench.step()
    assert bench.planner.match("a", 0, 32) == 0
    bench.tables["a"] = [list(range(1, 9))]
    assert stored(bench.admit("a", 0, 32)) == [0, 1, 2, 3]


def test_slots_reserved_while_a_prompt_was_computed_are_in_time_for_its_end(bench):
    """Of a long prompt that is computed in one step and answered with one token."""
    bench.begin("a", TOKENS)
    pool = bench.planner._stores.pools[0]
    pool.take(len(pool) - 1, 0.0)
    request = PlainRequest("b", [7, *TOKENS])
    bench.planner.on_new_request(request)
    bench.tables["b"] = [list(range(50, 59))]
    assert bench.planner.match("b", 0, 33) is None
    bench.runner.step()  # the lookup, and nothing else
    assert bench.planner.match("b", 0, 33) == 0
    assert stored(bench.admit("b", 0, 33)) == [0]
    bench.background()
    request.tokens = [7, *TOKENS, 1]
    bench.planner.finished("b", bench.tables["b"])
    assert stored(bench.step()) == [1, 2, 3]


def test_a_store_of_unknown_speed_is_tried(bench):
    plans = [bench.step() for _ in range(2)]
    assert [plan.tries_store for plan in plans] == [True, False]
