"""Whatever happens inside kvferry, each load that vLLM waits for is answered exactly once: one
answer too few hangs a request for ever, one too many kills the engine."""

from types import SimpleNamespace

import pytest

from kvferry.metrics import Metrics
from kvferry.offload.base import Finished, Load, Plan, Span
from kvferry.vllm_plugin.facade import SchedulerSide, WorkerSide
from kvferry.vllm_plugin.messages import StepMetadata, WorkerMetadata, encode


class SchedulerRole:
    """Plans the loads that were allocated, until it breaks."""

    def __init__(self):
        self.breaks_in = ""
        self.is_closed = False
        self._loads = []

    def match(self, request, computed_tokens):
        self._maybe_break("match")
        return 64

    def allocated(self, request, blocks, external_tokens):
        self._maybe_break("allocated")
        self._loads.append(load(request.request_id))

    def build(self, output):
        self._maybe_break("build")
        loads, self._loads = tuple(self._loads), []
        return Plan(loads=loads)

    def receive(self, metadata):
        self._maybe_break("receive")

    def close(self):
        self.is_closed = True

    def _maybe_break(self, place):
        if place == self.breaks_in:
            raise RuntimeError("broken")


class WorkerRole:
    """Ends the loads named in `ended`, until it breaks."""

    def __init__(self):
        self.breaks_in = ""
        self.is_closed = False
        self.ended = Finished()
        self.plans = []
        self.forwards = []

    def before_step(self, plan):
        self._maybe_break("before_step")
        self.plans.append(plan)

    def after_forward(self, is_empty_step):
        self._maybe_break("after_forward")
        self.forwards.append(is_empty_step)

    def collect(self):
        self._maybe_break("collect")
        return self.ended

    def report(self):
        return None

    def close(self):
        self.is_closed = True

    def _maybe_break(self, place):
        if place == self.breaks_in:
            raise RuntimeError("broken")


def load(request_id: str) -> Load:
    span = Span(0, 0, bytes(32), bytes(32), bytes(24), (5, 6))
    return Load(request_id, (span,), 0, 64, 1.0)


def request(request_id="r"):
    return SimpleNamespace(request_id=request_id)


BLOCKS = SimpleNamespace(get_block_ids=lambda: ([5, 6],))
STEP = SimpleNamespace(total_num_scheduled_tokens=0)


def step(*request_ids: str) -> StepMetadata:
    plan = encode(Plan(loads=tuple(load(request_id) for request_id in request_ids)))
    return StepMetadata(plan, is_empty=True)


# Scheduler side


def test_a_planned_load_is_left_to_the_worker():
    side = SchedulerSide(SchedulerRole(), Metrics())
    side.allocated(request(), BLOCKS, 64)

    metadata = side.build(STEP)

    assert [found.request_id for found in metadata.decode().loads] == ["r"]
    assert metadata.given_up == ()


@pytest.mark.parametrize("place", ["allocated", "build"])
def test_a_load_that_no_plan_names_is_given_up(place):
    role, metrics = SchedulerRole(), Metrics()
    side = SchedulerSide(role, metrics)
    role.breaks_in = place
    side.allocated(request(), BLOCKS, 64)

    assert side.build(STEP).given_up == (("r", (5, 6)),)
    assert side.build(STEP).given_up == ()
    assert role.is_closed
    assert metrics.value("kvferry_standing_aside") == 1


def test_a_scheduler_side_that_stands_aside_finds_nothing():
    role = SchedulerRole()
    side = SchedulerSide(role, Metrics())
    assert side.match(request(), 0) == (64, True)

    role.breaks_in = "match"
    assert side.match(request(), 0) == (0, False)
    role.breaks_in = ""
    assert side.match(request(), 0) == (0, False)
    assert side.build(STEP).plan is None


def test_the_scheduler_side_follows_a_worker_that_stands_aside():
    side = SchedulerSide(SchedulerRole(), Metrics())
    side.update(WorkerMetadata((), is_aside=True))

    assert side.match(request(), 0) == (0, False)


def test_a_siblings_metadata_is_ignored():
    side = SchedulerSide(SchedulerRole(), Metrics())
    side.update(object())

    assert side.match(request(), 0) == (64, True)


# Worker side


def test_a_load_is_answered_once():
    role = WorkerRole()
    side = WorkerSide(role, Metrics())
    side.before_step(step("r"))
    assert side.results() == Finished()

    role.ended = Finished(done=frozenset("r"))
    assert side.results().done == {"r"}
    assert side.results() == Finished()


def test_a_load_that_nobody_waits_for_is_not_answered():
    role = WorkerRole()
    role.ended = Finished(done=frozenset("x"), failed=frozenset("x"))

    assert WorkerSide(role, Metrics()).results() == Finished()


@pytest.mark.parametrize("place", ["before_step", "after_forward", "collect"])
def test_a_worker_that_breaks_answers_every_load_failed(place):
    role, metrics = WorkerRole(), Metrics()
    side = WorkerSide(role, metrics)
    side.before_step(step("a"))
    role.breaks_in = place
    side.before_step(step("b"))
    side.after_forward()

    found = side.results()

    assert found.done == found.failed == {"a", "b"}
    assert found.failed_blocks == {5, 6}
    assert side.results() == Finished()
    assert role.is_closed
    assert metrics.value("kvferry_standing_aside") == 1


def test_a_worker_that_stands_aside_answers_later_loads_failed_and_says_so_once():
    role = WorkerRole()
    side = WorkerSide(role, Metrics())
    role.breaks_in = "collect"
    side.before_step(step())
    side.results()
    assert side.metadata() == WorkerMetadata((), is_aside=True)
    assert side.metadata() is None

    side.before_step(step("late"))
    assert side.results().failed == {"late"}


def test_what_the_scheduler_side_gave_up_is_answered_failed():
    side = WorkerSide(WorkerRole(), Metrics())
    side.before_step(StepMetadata(None, is_empty=True, given_up=(("r", (5,)),)))

    found = side.results()

    assert (found.done, found.failed, found.failed_blocks) == ({"r"}, {"r"}, {5})
    assert side.results() == Finished()


def test_without_a_plan_no_store_goes_on():
    role = WorkerRole()
    side = WorkerSide(role, Metrics())
    side.before_step(StepMetadata(None, is_empty=False))

    assert role.plans[0].drop_stores


def test_each_step_ends_once_whether_vllm_says_so_or_not():
    role = WorkerRole()
    side = WorkerSide(role, Metrics())

    side.before_step(StepMetadata(encode(Plan()), is_empty=True))
    side.finish_empty_step()
    side.after_forward()
    side.before_step(StepMetadata(encode(Plan()), is_empty=False))
    side.finish_empty_step()
    side.after_forward()

    assert role.forwards == [True, False]
