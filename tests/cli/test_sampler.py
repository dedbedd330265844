"""A page that waits for what it shows is worth nothing when that hangs."""

import threading

from kvferry.cli.view.sampler import Sampler
from kvferry.errors import UnavailableError
from kvferry.testing.clock import ManualClock
from tests.cli.routed import wait_until


def test_what_hangs_is_not_waited_for_and_not_believed():
    clock, hangs, goes_on = ManualClock(), threading.Event(), threading.Event()
    told = []

    def take():
        if hangs.is_set():
            goes_on.wait()
        return 7

    sampler = Sampler(take, 0.01, clock, told.append)
    assert not sampler.latest().is_up
    sampler.start()
    wait_until(lambda: sampler.latest().is_up)
    hangs.set()
    clock.advance(4.0)
    wait_until(lambda: sampler.latest().value == 7)
    clock.advance(60.0)
    wait_until(lambda: not sampler.latest().is_up or clock.advance(60.0))
    assert "no answer for" in sampler.latest().error
    assert sampler.latest().value == 7
    goes_on.set()
    wait_until(lambda: sampler.latest().is_up)
    sampler.close()
    assert told == []


def test_errors_are_told_once_and_the_last_value_stays():
    clock, told, answers = ManualClock(), [], [1, 2]

    def take():
        if not answers:
            raise UnavailableError("test.away", "it is away")
        return answers.pop(0)

    sampler = Sampler(take, 0.001, clock, told.append)
    sampler.start()
    wait_until(lambda: sampler.latest().error == "it is away")
    assert (sampler.latest().value, told) == (2, ["it is away"])
    answers += [3] * 1000
    wait_until(lambda: sampler.latest().is_up)
    assert told[1] is None
    sampler.close()
