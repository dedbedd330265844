"""Ranks that are not the same would load one another's bytes: they are refused by name."""

import pytest

from kvferry.errors import IncompatibleError
from kvferry.offload.base import Identity, Report
from kvferry.offload.scheduler.agreement import Agreement
from tests.offload.parts import Bench, PlainRequest, make_part

STORE = b"s" * 16


PARTS = (make_part(),)


def identity(rank, parts=PARTS, stage=0, store_id=STORE, rank_count=2):
    return Identity(rank, rank_count, stage, store_id, parts)


def test_parts_are_known_when_all_ranks_have_spoken():
    agreement = Agreement(2, STORE)
    assert not agreement.add(identity(0))
    assert agreement.parts == ()
    assert not agreement.add(identity(0))
    assert agreement.add(identity(1))
    assert agreement.parts == (make_part(),)


def test_stages_have_parts_of_their_own():
    agreement = Agreement(2, STORE)
    agreement.add(identity(0))
    other = make_part(group_index=1)
    assert agreement.add(identity(1, (other,), stage=1))
    assert agreement.parts == (make_part(), other)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parts": (make_part(chunk_tokens=16),)}, "chunk_tokens"),
        ({"parts": (make_part(), make_part(group_index=1))}, "parts"),
        ({"store_id": b"t" * 16}, "store_id"),
        ({"rank_count": 3}, "rank_count"),
    ],
)
def test_who_differs_is_refused_by_field(change, field):
    agreement = Agreement(2, STORE)
    agreement.add(identity(0))
    with pytest.raises(IncompatibleError) as refused:
        agreement.add(identity(1, **change))
    assert refused.value.context["field"] == field
    assert agreement.parts == ()


def test_a_new_name_is_another_namespace_for_all_who_know_it():
    one, other = Agreement(1, STORE), Agreement(1, STORE)
    for agreement in (one, other):
        agreement.add(identity(0, rank_count=1))
    before = one.parts[0].namespace
    one.rename(b"step 2")
    assert one.parts[0].namespace != before == other.parts[0].namespace
    other.rename(b"step 2")
    assert one.parts == other.parts
    other.rename(b"step 3")
    assert one.parts != other.parts


def test_requests_do_not_wait_for_ranks_that_were_refused():
    bench = Bench()
    bench.planner.on_new_request(PlainRequest("r", list(range(9))))
    assert bench.planner.match("r", 0, 9) is None
    stranger = Identity(0, 1, 0, b"t" * 16, bench.parts)
    bench.planner.receive(Report((stranger,)))
    assert bench.planner.match("r", 0, 9) == 0
    assert bench.metrics.value("kvferry_identity_refusals_total") == 1
