"""The engine's thread and the movers of both ranks at the same time, as they run in an engine: no
thread falls over what another one changes, and what is loaded is right."""

import sys
import threading

import pytest

from kvferry.clock import SystemClock
from kvferry.errors import UnavailableError
from kvferry.metrics import Metrics
from kvferry.testing.clock import Chance
from kvferry.testing.kv_memory import EngineShape
from kvferry.transfer import workers
from kvferry.transfer.halves import Load, Report, Watch
from kvferry.transfer.memory import Motion
from kvferry.transfer.params import Offer
from kvferry.transfer.session import ThreadDialer
from kvferry.transfer.settings import Settings
from kvferry.transfer.workers import ProducerWorker
from tests.transfer.rig import SLOT, TOKENS, Rig

PLACES = 64
"""Requests at a time: each has two blocks on either side."""
REQUESTS = 600
REPORTS = 10
"""In one step, so that one of them meets a change."""
PATIENCE = 60_000
OFFER = Offer(b"t" * 16, b"b" * 16, "host", 1, b"n" * 32, b"k" * 32, TOKENS)
SHAPE = EngineShape(1, (4,), (1,), ("LBHN",), 2 * PLACES)
SETTINGS = Settings(
    secret=b"0123456789abcdef",
    staging_bytes=PLACES * SLOT,
    slot_bytes=SLOT,
    quarantine_bytes_max=PLACES * SLOT // 2,
    lease_s=0.5,
    lease_total_s=5.0,
    read_deadline_s=0.2,
    rest_s=0.01,
    redial_s=0.005,
)


class Weather:
    """Some reads take long, few are lost. `is_calm`: none any more."""

    def __init__(self):
        self._chance = Chance(1)
        self.is_calm = False

    def moves(self, poster, peer):
        number = 0 if self.is_calm else self._chance.randint(0, 999)
        if number == 999:
            return Motion.LOSE
        return Motion.END if number < 50 else Motion.WAIT

    def strays(self, has_rival):
        return True

    def letters(self, sender, receiver):
        return 1


class Locked:
    """A link of a fabric that several threads drive."""

    def __init__(self, link, lock):
        self._link = link
        self._lock = lock

    def __getattr__(self, name):
        found = getattr(self._link, name)
        return self._guarded(found) if callable(found) else found

    def _guarded(self, call):
        def guarded(*arguments):
            with self._lock:
                return call(*arguments)

        return guarded


class Engines:
    """Both engines' schedulers, on the thread of the test."""

    def __init__(self, rig):
        self.rig = rig
        self.chance = Chance(2)
        self.free_sources, self.free_targets = list(range(PLACES)), list(range(PLACES))
        self.sources, self.targets = {}, {}
        self.loading = set()
        self.begun_count = self.loaded_count = 0

    @property
    def is_over(self):
        places = len(self.free_sources), len(self.free_targets)
        return self.begun_count == REQUESTS and places == (PLACES, PLACES) and self.rig.rank.is_idle

    def step(self):
        rig = self.rig
        if self.begun_count < REQUESTS and self.free_sources and self.free_targets:
            self.arrive()
        rig.plan()
        report = Report()
        for _ in range(REPORTS):
            report = report.merge(rig.rank.report())
        for name in report.granted:
            self.begin_load(name)
        for name, _ in report.refused:
            self.leave(name)
        if self.loading and self.chance.randint(0, 9) == 0:
            rig.plan(drops=[sorted(self.loading)[0]])
        finished = rig.rank.collect()
        for name in finished.done:
            self.check(name, name in finished.failed)
        for name in rig.source_rank.take_ended():
            self.free_sources.append(self.sources.pop(name))
        assert rig.rank.out_count <= rig.rank.taken_count + PLACES

    def arrive(self):
        name = f"request {self.begun_count}"
        self.begun_count += 1
        self.sources[name], self.targets[name] = self.free_sources.pop(), self.free_targets.pop()
        offer = self.rig.hold(name, blocks_of(self.sources[name]))
        self.rig.plan(watches=[Watch(name, offer)])

    def begin_load(self, name):
        if name in self.targets and name not in self.loading:
            blocks = blocks_of(self.targets[name])
            for block in blocks:
                self.rig.target_group.spoil(block)
            self.loading.add(name)
            self.rig.plan(loads=[Load(name, (blocks,), 0, TOKENS)])

    def leave(self, name):
        if name in self.targets and name not in self.loading:
            self.free_targets.append(self.targets.pop(name))
            self.rig.plan(drops=[name])

    def check(self, name, has_failed):
        self.loading.remove(name)
        place = self.targets.pop(name)
        assert has_failed or self.rig.holds(blocks_of(place), name)
        self.loaded_count += not has_failed
        self.free_targets.append(place)


def blocks_of(place):
    return 2 * place, 2 * place + 1


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_all_threads_at_the_same_time(hasty):
    lock, weather, clock = threading.RLock(), Weather(), SystemClock()
    rig = Rig(SETTINGS, SHAPE, clock, Metrics(), weather, lambda link: Locked(link, lock))
    engines = Engines(rig)
    movers = rig.source_mover, rig.mover
    for mover in movers:
        mover.start()
    try:
        for _ in range(PATIENCE):
            engines.step()
            weather.is_calm = engines.begun_count == REQUESTS
            if engines.is_over:
                break
            clock.sleep(0.0002)
    finally:
        for mover in movers:
            mover.close(5.0)
    assert not any(mover.has_failed for mover in movers)
    assert engines.is_over and rig.rank.taken_count == 0
    assert engines.loaded_count > REQUESTS // 3


@pytest.mark.parametrize(
    "failure", [UnicodeError("label too long"), OverflowError("port must be 0-65535")]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handshake_that_fails_as_nobody_expected_has_an_end(failure):
    """Without one, eight of them would keep every other producer from being dialled."""

    def dial(offer):
        raise failure

    dialer, clock = ThreadDialer(dial), SystemClock()
    dialer.submit(OFFER)
    assert_unavailable(dialer, clock)


def test_a_handshake_without_a_thread_has_an_end(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    dialer, clock = ThreadDialer(lambda offer: None), SystemClock()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        dialer.submit(OFFER)
    assert_unavailable(dialer, clock)


def assert_unavailable(dialer, clock):
    for _ in range(PATIENCE):
        if results := dialer.poll():
            break
        clock.sleep(0.001)
    ((boot, result),) = results
    assert boot == OFFER.boot and isinstance(result, UnavailableError)


class Hanging:
    """A link in a call that does not return. `calls`: those that another thread made meanwhile."""

    def __init__(self):
        self.is_in, self.may_return = threading.Event(), threading.Event()
        self.calls = []

    def poll(self):
        self.is_in.set()
        self.may_return.wait()
        return []

    def close(self, timeout_s):
        self.calls.append("close")
        return True


def test_a_link_that_hangs_is_left_to_its_thread(monkeypatch):
    """Two threads in one agent end the process; and what it has registered must stay mapped."""
    monkeypatch.setattr(workers, "CLOSE_S", 0.01)
    link = Hanging()
    worker = ProducerWorker(SETTINGS, SystemClock(), Metrics(), link, None, [], None)
    worker.start()
    link.is_in.wait()
    assert not worker.close() and link.calls == []
    link.may_return.set()
    assert worker.mover.close(60.0) and worker.close() and link.calls == ["close"]
