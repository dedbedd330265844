"""Whatever happens inside kvferry, each load that vLLM waits for is answered once, and blocks that
it keeps for us are let go once, and not while a consumer may believe that they are kept."""

from types import SimpleNamespace

import pytest

from kvferry.metrics import Metrics
from kvferry.testing.clock import ManualClock
from kvferry.transfer.halves import ConsumerPlan, Finished, Hold, Load, ProducerPlan
from kvferry.vllm_plugin.pd.facade import Results, SchedulerSide, WorkerSide
from kvferry.vllm_plugin.pd.messages import Plans, StepMetadata, WorkerMetadata, encode
from kvferry.vllm_plugin.pd.worker import Collected

LEASE_S = 30.0
PARAMS = {"do_remote_prefill": True}
BLOCKS = SimpleNamespace(get_block_ids=lambda: ([0, 5, 6],))


class Breaking:
    """Breaks where it is told to."""

    def __init__(self):
        self.breaks_in = ""
        self.is_closed = False

    def close(self):
        self.is_closed = True

    abandon = close

    def _maybe_break(self, place):
        if place == self.breaks_in:
            raise RuntimeError("broken")


class SchedulerRole(Breaking):
    """Plans what was allocated and kept."""

    has_news = False

    def __init__(self):
        super().__init__()
        self._loads, self._holds = [], []

    def match(self, request, computed_tokens):
        self._maybe_break("match")
        return 64

    def allocated(self, request, blocks, external_tokens):
        self._maybe_break("allocated")
        self._loads.append(load(request.request_id))

    def finished(self, request, tables):
        self._maybe_break("finished")
        self._holds.append(hold(request.request_id))
        return PARAMS

    def build(self):
        self._maybe_break("build")
        plans = plans_of(self._loads, self._holds)
        self._loads, self._holds = [], []
        return plans

    def ended(self, sent, loaded, failed):
        self._maybe_break("ended")


class WorkerRole(Breaking):
    """Ends what it is told to."""

    def __init__(self):
        super().__init__()
        self.collected = Collected()
        self.waited_count = 0

    def before_step(self, plans):
        self._maybe_break("before_step")

    def wait(self):
        self.waited_count += 1

    def collect(self):
        self._maybe_break("collect")
        return self.collected

    def report(self):
        return None


def load(request_id):
    return Load(request_id, ((-1, 5, 6),), 0, 64)


def hold(request_id):
    return Hold(request_id, b"t" * 16, b"g" * 16, 64, ((5, 6),), b"k" * 32)


def plans_of(loads=(), holds=()):
    return Plans(ProducerPlan(tuple(holds)), ConsumerPlan(loads=tuple(loads)))


def step(loads=(), holds=()):
    return StepMetadata(encode(plans_of(map(load, loads), map(hold, holds))))


def request(request_id="r"):
    return SimpleNamespace(request_id=request_id)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def worker(clock):
    role = WorkerRole()
    return role, WorkerSide(role, Metrics(), clock, LEASE_S)


def test_what_is_planned_is_left_to_the_worker():
    side = SchedulerSide(SchedulerRole(), Metrics())
    side.allocated(request("a"), BLOCKS, 64)
    assert side.finished(request("b"), ([5],)) == (True, PARAMS)
    metadata = side.build(is_empty=False)
    assert (metadata.lost_loads, metadata.lost_holds) == ((), ())
    assert metadata.decode() == plans_of([load("a")], [hold("b")])


def test_only_a_step_that_computes_nothing_waits(worker):
    role, side = worker
    for is_empty in (False, True, False):
        side.before_step(StepMetadata(b"", is_empty=is_empty))
        side.results()
    assert role.waited_count == 1


def test_a_step_without_news_costs_nothing():
    assert SchedulerSide(SchedulerRole(), Metrics()).build(is_empty=False) == StepMetadata(b"")


@pytest.mark.parametrize("place", ["allocated", "build"])
def test_what_no_plan_names_is_given_up(place):
    role = SchedulerRole()
    side = SchedulerSide(role, Metrics())
    kept = side.finished(request("kept"), ([5],))
    role.breaks_in = place
    side.allocated(request(), BLOCKS, 64)
    metadata = side.build(is_empty=False)
    assert metadata == StepMetadata(None, (("r", (5, 6)),), ("kept",))
    assert side.build(is_empty=False) == StepMetadata(None)
    assert kept[0]
    assert role.is_closed


@pytest.mark.parametrize("place", ["match", "finished", "ended"])
def test_a_scheduler_side_that_stands_aside_promises_nothing(place):
    role = SchedulerRole()
    side = SchedulerSide(role, Metrics())
    role.breaks_in = place
    side.match(request(), 0)
    side.finished(request(), ([5],))
    output = SimpleNamespace(
        kv_connector_worker_meta=object(), finished_sending=None, finished_recving={"x"}
    )
    side.update(output)
    assert side.match(request(), 0) == (0, False)
    assert side.finished(request("q"), ([5],)) == (False, None)
    assert side.build(is_empty=False).plans is None


def test_each_is_answered_once(worker):
    role, side = worker
    side.before_step(step(["a"], ["b"]))
    assert side.results() == Results()
    role.collected = Collected(Finished(frozenset("ax"), frozenset("ax")), frozenset("bx"))
    found = side.results()
    assert (found.done, found.failed, found.sent) == ({"a"}, {"a"}, {"b"})
    assert found.blocks == {5, 6}
    assert side.results() == Results()


@pytest.mark.parametrize("place", ["before_step", "collect"])
def test_a_worker_that_breaks_fails_its_loads_and_waits_for_its_leases(worker, clock, place):
    """A consumer reads until its lease is over, whatever has broken here."""
    role, side = worker
    side.before_step(step(["a"], ["b"]))
    role.breaks_in = place
    side.before_step(step(["c"], ["d"]))
    found = side.results()
    assert found.done == found.failed == {"a", "c"}
    assert role.is_closed
    clock.advance(LEASE_S)
    assert side.results() == Results()
    clock.advance(LEASE_S * 0.02)
    assert side.results().sent == {"b", "d"}
    assert side.results() == Results()
    assert side.metadata() == WorkerMetadata((), is_aside=True)
    assert side.metadata() is None


def test_what_the_scheduler_side_gave_up_is_answered(worker):
    """Nobody was told of these blocks: they are free at once."""
    role, side = worker
    side.before_step(StepMetadata(None, (("a", (5,)),), ("b",)))
    found = side.results()
    assert (found.done, found.failed, found.blocks, found.sent) == ({"a"}, {"a"}, {5}, {"b"})
    assert side.results() == Results()
    assert role.is_closed


def test_without_handshakes_of_ours_nothing_is_opened():
    """Beside another connector whose handshakes vLLM hands out."""
    role = SchedulerRole()
    SchedulerSide(role, Metrics()).ready([object()])
    assert not hasattr(role, "opened")
