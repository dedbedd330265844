"""What an engine would lose if the runner failed: its scheduler would wait, or a dead catalog would
never be noticed, or never be forgiven."""

import threading

import pytest

from kvferry.catalog.runner import Runner, TicketState
from kvferry.clock import SystemClock
from kvferry.errors import ExhaustedError, InternalError, UnavailableError
from kvferry.metrics import Metrics
from kvferry.testing.clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def runner(clock, metrics):
    return Runner(clock, metrics, queue_max=4, failures_max=3, backoff_s=1.0, backoff_max_s=8.0)


def unavailable():
    raise UnavailableError("test.down", "down")


def answer():
    return 42


def state(ticket, clock):
    return ticket.state(clock.now_s())


def run(runner, work, deadline_s=1.0):
    ticket = runner.submit(work, deadline_s)
    runner.step()
    return ticket


def open_breaker(runner):
    for _ in range(3):
        run(runner, unavailable)


# Tickets.


def test_work_is_pending_until_its_value_is_there(runner, clock):
    ticket = runner.submit(answer, 1.0)
    assert state(ticket, clock) is TicketState.PENDING
    assert runner.step()
    assert state(ticket, clock) is TicketState.DONE
    assert ticket.value == 42
    assert not runner.step()


def test_work_is_done_in_the_order_in_which_it_came(runner):
    seen = []
    for number in range(4):
        runner.submit(lambda number=number: seen.append(number), 1.0)
    while runner.step():
        pass
    assert seen == [0, 1, 2, 3]


def test_a_failure_keeps_its_error(runner, clock):
    ticket = run(runner, unavailable)
    assert state(ticket, clock) is TicketState.FAILED
    assert ticket.error.kind == "test.down"


def test_a_ticket_is_late_at_its_deadline_whatever_the_runner_does(runner, clock):
    ticket = runner.submit(answer, 1.0)
    clock.advance(0.999)
    assert state(ticket, clock) is TicketState.PENDING
    clock.advance(0.001)
    assert state(ticket, clock) is TicketState.LATE
    runner.step()
    assert state(ticket, clock) is TicketState.LATE
    assert ticket.value is None


def test_what_waited_too_long_is_not_even_tried(runner, clock):
    seen = []
    runner.submit(lambda: seen.append(1), 1.0)
    clock.advance(2)
    runner.step()
    assert seen == []


def test_a_late_result_goes_to_the_orphanage(runner, clock):
    orphans = []

    def slow():
        clock.advance(2)
        return "slots"

    ticket = runner.submit(slow, 1.0, orphans.append)
    runner.step()
    assert state(ticket, clock) is TicketState.LATE
    assert ticket.value is None
    assert orphans == ["slots"]


def test_a_result_in_time_is_no_orphan(runner):
    orphans = []
    runner.submit(answer, 1.0, orphans.append)
    runner.step()
    assert orphans == []


def test_nobody_has_to_wait_for_what_was_asked(runner, clock):
    orphans = []
    queued = runner.submit(answer, 1.0, orphans.append)
    assert queued.abandon(clock.now_s()) is None
    runner.step()
    assert orphans == []

    def abandoned():
        assert running.abandon(clock.now_s()) is None
        return "slots"

    for _ in range(5):
        running = runner.submit(abandoned, 1.0, orphans.append)
        runner.step()
    assert orphans == ["slots"] * 5
    assert runner.is_available()
    done = runner.submit(answer, 1.0, orphans.append)
    runner.step()
    assert done.abandon(clock.now_s()) == answer()
    assert len(orphans) == 5


def test_a_full_queue_refuses(runner, clock):
    tickets = [runner.submit(answer, 1.0) for _ in range(5)]
    assert [state(t, clock) for t in tickets].count(TicketState.REFUSED) == 1
    assert state(tickets[-1], clock) is TicketState.REFUSED


def test_a_bug_in_a_task_ends_the_task_and_not_the_runner(runner, clock, metrics):
    ticket = run(runner, lambda: 1 // 0)
    assert state(ticket, clock) is TicketState.FAILED
    assert isinstance(ticket.error, InternalError)
    assert isinstance(runner.last_error.__cause__, ZeroDivisionError)
    assert metrics.value("kvferry_internal_errors_total", where="runner") == 1
    assert state(run(runner, answer), clock) is TicketState.DONE


def test_a_bug_in_an_orphanage_is_counted_too(runner, clock, metrics):
    runner.submit(lambda: clock.advance(2), 1.0, lambda _: 1 // 0)
    runner.step()
    assert metrics.value("kvferry_internal_errors_total", where="runner") == 1


# The breaker.


def test_the_breaker_opens_after_failures_in_a_row(runner, clock, metrics):
    run(runner, unavailable)
    run(runner, unavailable)
    run(runner, answer)
    run(runner, unavailable)
    run(runner, unavailable)
    assert runner.is_available()
    run(runner, unavailable)
    assert not runner.is_available()
    assert state(runner.submit(answer, 1.0), clock) is TicketState.REFUSED
    assert metrics.value("kvferry_breaker_open") == 1
    assert metrics.value("kvferry_breaker_openings_total") == 1


def test_late_answers_open_it(runner, clock):
    for _ in range(3):
        assert runner.is_available()
        run(runner, lambda: clock.advance(2))
    assert not runner.is_available()


def test_an_overdue_task_opens_it_while_it_runs(runner, clock, metrics):
    def hang():
        clock.advance(2)
        assert state(runner.submit(answer, 1.0), clock) is TicketState.REFUSED
        assert metrics.value("kvferry_breaker_open") == 1

    ticket = run(runner, hang)
    assert ticket.error is None
    assert not runner.is_available(), "it came back just now: not all at once"
    clock.advance(1)
    assert runner.is_available()
    run(runner, unavailable)
    assert not runner.is_available(), "the probe failed"


def test_a_full_catalog_is_not_a_dead_one(runner):
    def full():
        raise ExhaustedError("test.full", "full")

    for _ in range(10):
        run(runner, full)
    assert runner.is_available()


def test_a_queue_that_is_too_slow_is_not_a_dead_catalog(runner, clock):
    for _ in range(4):
        runner.submit(answer, 1.0)
    clock.advance(2)
    while runner.step():
        pass
    assert runner.is_available()


def test_what_waits_when_it_opens_fails_at_once(runner, clock):
    tickets = [runner.submit(unavailable, 1.0) for _ in range(3)]
    behind = runner.submit(answer, 1.0)
    while runner.step():
        pass
    assert [state(t, clock) for t in tickets] == [TicketState.FAILED] * 3
    assert state(behind, clock) is TicketState.FAILED


def test_one_probe_after_the_backoff_closes_it(runner, clock, metrics):
    open_breaker(runner)
    clock.advance(1.0)
    probe = runner.submit(answer, 1.0)
    assert state(runner.submit(answer, 1.0), clock) is TicketState.REFUSED
    runner.step()
    assert state(probe, clock) is TicketState.DONE
    assert runner.is_available()
    assert metrics.value("kvferry_breaker_open") == 0


def test_each_failed_probe_doubles_the_backoff_up_to_a_limit(runner, clock):
    open_breaker(runner)
    for longest_s in (1, 2, 4, 8, 8):
        shortest_s = longest_s / 2
        clock.advance(shortest_s - 0.001)
        assert not runner.is_available()
        clock.advance(longest_s - shortest_s + 0.001)
        assert runner.is_available()
        run(runner, unavailable)
    clock.advance(8)
    run(runner, answer)
    open_breaker(runner)
    clock.advance(1)
    assert runner.is_available(), "success did not reset the backoff"


def test_engines_do_not_probe_all_at_the_same_moment():
    moments = set()
    for seed in range(20):
        clock = ManualClock(seed)
        runner = Runner(clock, backoff_s=1.0)
        open_breaker(runner)
        while not runner.is_available():
            clock.advance(0.01)
        moments.add(round(clock.now_s(), 2))
    assert len(moments) > 10


def test_it_closes_by_itself_through_periodic_work(runner, clock):
    runner.periodic(answer, 5.0)
    open_breaker(runner)
    clock.advance(5)
    assert runner.step()
    assert runner.submit(answer, 1.0).state(clock.now_s()) is TicketState.PENDING
    assert runner.submit(answer, 1.0).state(clock.now_s()) is TicketState.PENDING


# Periodic work.


def test_periodic_work_comes_back(runner, clock):
    seen = []
    runner.periodic(lambda: seen.append(clock.now_s()), 5.0)
    start_s = clock.now_s()
    for _ in range(20):
        clock.advance(1)
        while runner.step():
            pass
    assert seen == [start_s + 5 * i for i in (1, 2, 3, 4)]


def test_periodic_work_does_not_wait_behind_the_queue(runner, clock):
    seen = []
    runner.periodic(lambda: seen.append("heartbeat"), 5.0)
    clock.advance(5)
    runner.submit(lambda: seen.append("lookup"), 1.0)
    runner.step()
    assert seen == ["heartbeat"]


# Closing.


def test_close_does_what_is_queued_and_takes_nothing_new(runner, clock):
    ticket = runner.submit(answer, 1.0)
    runner.close(1.0)
    runner.close(1.0)
    assert ticket.value == 42
    assert state(runner.submit(answer, 1.0), clock) is TicketState.REFUSED


def test_close_leaves_what_it_has_no_time_for(runner, clock):
    first = runner.submit(lambda: clock.advance(2), 10.0)
    second = runner.submit(answer, 10.0)
    runner.close(1.0)
    assert state(first, clock) is TicketState.DONE
    assert state(second, clock) is TicketState.REFUSED


# With a thread.


@pytest.fixture
def threaded():
    runner = Runner(SystemClock())
    runner.start()
    yield runner
    runner.close(5.0)


def test_the_thread_does_queued_and_periodic_work(threaded):
    done, beat = threading.Event(), threading.Event()
    threaded.periodic(beat.set, 0.01)
    threaded.submit(done.set, 5.0)
    assert done.wait(5)
    assert beat.wait(5)


def test_closing_does_what_is_queued(threaded):
    first = threading.Event()
    seen = []
    threaded.submit(first.wait, 5.0)
    for number in range(20):
        threaded.submit(lambda number=number: seen.append(number), 5.0)
    first.set()
    threaded.close(5.0)
    assert seen == list(range(20))


def test_a_hung_task_stops_neither_the_caller_nor_close():
    runner = Runner(SystemClock())
    runner.start()
    release, running = threading.Event(), threading.Event()
    orphans = []

    def hang():
        running.set()
        release.wait(30)
        return "slots"

    hung = runner.submit(hang, 0.01, orphans.append)
    behind = runner.submit(answer, 0.01)
    assert running.wait(5)
    clock = SystemClock()
    clock.sleep(0.02)
    assert hung.state(clock.now_s()) is TicketState.LATE
    assert behind.state(clock.now_s()) is TicketState.LATE
    refused = runner.submit(answer, 5.0)
    assert refused.state(clock.now_s()) is TicketState.REFUSED, "the breaker did not open"
    runner.close(0.05)
    assert not release.is_set()
    release.set()
    runner._thread.join(5)
    assert not runner._thread.is_alive()
    assert orphans == ["slots"]
