"""Two processes over NIXL, and what happens to one of them: the other answers rightly, in time, and
goes on."""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvferry._native", reason="keys of prompts need the native extension")

from kvferry._nixl import PACKAGES
from kvferry.catalog.runner import Runner
from kvferry.clock import SystemClock
from kvferry.device.host import HostCopier
from kvferry.metrics import Metrics
from kvferry.testing.kv_memory import EngineShape, engine_memory, rank_layouts
from kvferry.testing.tally import Tally
from kvferry.transfer.consumer import Consumer
from kvferry.transfer.nixl_link import NixlLink
from kvferry.transfer.producer import Prefix
from kvferry.transfer.workers import ConsumerWorker

pytestmark = [
    pytest.mark.skipif(
        not any(importlib.util.find_spec(package) for package in PACKAGES),
        reason="NIXL is not installed",
    ),
]

if not pytestmark[0].args[0]:
    from tests.transfer.peer import MODELS, NAMESPACE, Peer, compatibility, settings

TOKENS = 400
ROUNDS = 60_000
SHAPE = EngineShape(1, (32,), (1,), ("LBNH",), 512)


class Engine:
    """The consumer: another block size and another order in memory than the producer's."""

    def __init__(self, **changes):
        self.settings, self.clock, self.tally = settings(**changes), SystemClock(), Tally()
        self.memory = engine_memory(MODELS, SHAPE)
        ((self.group,),) = self.memory
        layouts = rank_layouts(self.memory)
        self.worker = ConsumerWorker(
            self.settings,
            self.clock,
            self.tally,
            NixlLink(self.clock),
            layouts[0],
            layouts,
            compatibility(self.settings),
            lambda regions, geometry: HostCopier(regions, geometry, 1),
        )
        self.runner = Runner(self.clock, Metrics())
        self.consumer = Consumer(
            self.settings, self.clock, self.tally, self.runner, NAMESPACE, rank_count=1
        )
        self.worker.open()
        self.runner.start()
        self.worker.start()
        self.count = 0
        self.blocks = iter(range(0, SHAPE.block_count, 32))

    def step(self, done, failed):
        self.worker.rank.begin(self.consumer.plan())
        self.worker.mover.wake()
        finished = self.worker.rank.collect()
        self.consumer.receive(self.worker.rank.report())
        self.consumer.loaded(finished.done, finished.failed)
        done |= finished.done
        failed |= finished.failed
        self.clock.sleep(0.001)

    def begin(self, params, text, token_count=TOKENS):
        """From arrival to the load under way. The request and its first block; None if the engine
        must compute everything itself."""
        self.count += 1
        name = f"request {self.count}"
        self.consumer.on_new_request(name, params, Prefix(range(token_count)))
        done, failed = set(), set()
        for _ in range(ROUNDS):
            matched = self.consumer.matched(name, 0)
            if matched is not None:
                break
            self.step(done, failed)
        if not matched:
            self.consumer.finished(name)
            self.step(done, failed)
            return None
        first = next(self.blocks)
        table = tuple(range(first, first - (-token_count // 32)))
        for block in table:
            self.group.spoil(block)
        assert self.consumer.allocated(name, (table,), 0, matched)
        self.step(done, failed)
        return name, table, text, token_count

    def end(self, load):
        """Whether it was loaded. What was loaded is what was there."""
        name, table, text, token_count = load
        done, failed = set(), set()
        for _ in range(ROUNDS):
            if name in done:
                break
            self.step(done, failed)
        assert name in done
        self.consumer.finished(name)
        is_right = [
            self.group.holds(block, index, text, token_count) for index, block in enumerate(table)
        ]
        assert all(is_right) or name in failed
        return name not in failed

    def load(self, params, text, token_count=TOKENS):
        load = self.begin(params, text, token_count)
        return None if load is None else self.end(load)

    def wait(self, holds):
        done, failed = set(), set()
        for _ in range(ROUNDS):
            if holds():
                return
            self.step(done, failed)
        raise AssertionError(f"it did not happen: {dict(self.tally)}")


@pytest.fixture
def world():
    """Makes producers and consumers, and ends them."""
    made = []

    class World:
        def peer(self, **changes):
            made.append(Peer(**changes))
            return made[-1]

        def engine(self, **changes):
            made.append(Engine(**changes))
            return made[-1]

    yield World()
    for one in reversed(made):
        if isinstance(one, Engine):
            one.worker.close()
            one.runner.close(1.0)
        else:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(signal.SIGCONT)
            one.kill()


def test_what_was_computed_there_is_here_and_the_producer_is_told(world):
    peer, engine = world.peer(), world.engine()
    for number in range(5):
        params = peer.ask("prefill", f"text {number}", TOKENS, 32 * number)
        assert engine.load(params, f"text {number}") is True
    released = []
    engine.wait(lambda: released.extend(peer.ask("ended")) or len(released) == 5)
    assert peer.ask("held_blocks") == 0


def test_an_expired_offer_is_computed_here(world):
    """The lease is over before anybody came: blocks are another user's by then."""
    peer, engine = world.peer(lease_s=0.3, early_s=0.1), world.engine()
    params = peer.ask("prefill", "text", TOKENS, 0)
    ended = []
    engine.wait(lambda: ended.extend(peer.ask("ended")) or bool(ended))
    peer.ask("overwrite", 0, 32)
    assert engine.load(params, "text") is None


def test_a_producer_that_was_killed_costs_its_requests_and_no_others(world):
    first, second = world.peer(), world.peer()
    engine = world.engine(claim_deadline_s=2.0, read_deadline_s=3.0)
    assert engine.load(first.ask("prefill", "a", TOKENS, 0), "a") is True
    held = first.ask("prefill", "b", TOKENS, 64)
    never_seen = first.ask("prefill", "c", TOKENS, 128)
    load = engine.begin(held, "b")
    first.kill()
    if load is not None:
        engine.end(load)
    assert not engine.load(never_seen, "c")
    assert engine.load(second.ask("prefill", "d", TOKENS, 0), "d") is True


def test_a_producer_that_stands_still_fails_its_requests_in_time(world):
    """And what lands when it goes on lands in quarantine, not in anybody's blocks."""
    peer = world.peer(lease_s=60.0)
    engine = world.engine(read_deadline_s=1.0, claim_deadline_s=5.0)
    assert engine.load(peer.ask("prefill", "a", TOKENS, 0), "a") is True
    name = "request under way"
    params = peer.ask("prefill", "b", TOKENS, 64)
    engine.consumer.on_new_request(name, params, Prefix(range(TOKENS)))
    engine.wait(lambda: engine.consumer.matched(name, 0) is not None)
    peer.process.send_signal(signal.SIGSTOP)
    table = tuple(range(256, 256 - (-TOKENS // 32)))
    for block in table:
        engine.group.spoil(block)
    before = bytes(engine.group._buffer.view)
    assert engine.consumer.allocated(name, (table,), 0, TOKENS)
    is_loaded = engine.end((name, table, "b", TOKENS))
    if not is_loaded:
        assert engine.worker.rank.out_count == engine.worker.rank.taken_count > 0
        peer.process.send_signal(signal.SIGCONT)
        engine.wait(lambda: engine.worker.rank.taken_count == 0)
        assert bytes(engine.group._buffer.view) == before
    peer.process.send_signal(signal.SIGCONT)
    assert engine.load(peer.ask("prefill", "c", TOKENS, 128), "c") is True


def test_a_consumer_that_was_killed_keeps_nothing(world):
    """Its lease runs out, and then its blocks are the producer's again."""
    peer = world.peer(lease_s=1.0)
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.test_processes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert "ready\n" in reader.stdout
        reader.stdin.write(json.dumps(peer.ask("prefill", "a", TOKENS, 0)) + "\n")
        reader.stdin.flush()
        assert "granted\n" in reader.stdout
        clock = SystemClock()
        clock.sleep(2.0)  # it renews
        assert peer.ask("ended") == [] and peer.ask("held_blocks") == 25
    finally:
        reader.kill()
        reader.wait()
    for _ in range(ROUNDS):
        if ended := peer.ask("ended"):
            break
        clock.sleep(0.01)
    assert (ended, peer.ask("held_blocks")) == (["request 1"], 0)
    assert peer.ask("expired_count") == 1


def test_a_producer_that_comes_back_is_another_one(world):
    engine = world.engine(claim_deadline_s=2.0)
    old = world.peer()
    stale = old.ask("prefill", "a", TOKENS, 0)
    assert engine.load(old.ask("prefill", "b", TOKENS, 64), "b") is True
    port = old.ask("port")
    old.kill()
    new = world.peer(bind_port=port)
    assert not engine.load(stale, "a")
    assert engine.load(new.ask("prefill", "c", TOKENS, 0), "c") is True


def test_many_producers_come_and_go(world):
    """Nothing of those that went stays behind."""
    engine = world.engine(peer_idle_s=0.2)
    for number in range(4):
        peer = world.peer()
        assert engine.load(peer.ask("prefill", f"{number}", TOKENS, 0), f"{number}") is True
        peer.kill()
    engine.wait(lambda: not list(engine.worker.rank.peers))


def hold():
    """A consumer that has it granted, keeps it claimed, and does no more."""
    engine = Engine()
    print("ready", flush=True)
    engine.consumer.on_new_request("r", json.loads(input()), Prefix(range(TOKENS)))
    engine.wait(lambda: engine.consumer.matched("r", 0) == TOKENS - 1)
    print("granted", flush=True)
    while True:
        engine.step(set(), set())


if __name__ == "__main__":
    hold()
