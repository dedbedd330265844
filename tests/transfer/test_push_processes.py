"""Two processes over NIXL where producers push: bytes come while they are computed, and whatever
becomes of one of the two, the other answers rightly, in time, and goes on."""

import signal

import pytest

from tests.transfer import test_processes
from tests.transfer.test_processes import TOKENS

pytestmark = test_processes.pytestmark
world = test_processes.world

if not pytestmark[0].args[0]:
    from kvferry.transfer.params import appoint, read
    from tests.transfer.peer import SECRET

PUSH = {"direction": "push", "page_tokens_max": 64}


class Meeting:
    """What a router knows of a producer, from its first answer."""

    def __init__(self, peer, engine):
        self.peer, self.engine = peer, engine
        params = peer.ask("prefill", "first", TOKENS, 0)
        assert engine.load(params, "first") is True
        self.offer, _ = read(SECRET, params)

    def start(self, text: str, first_block: int):
        """Both engines at once. The load under way."""
        transfer = self.engine.clock.random_bytes(16)
        to_producer, to_consumer = appoint(SECRET, self.offer, transfer)
        self.peer.ask("start", to_producer, text, TOKENS, first_block)
        load = self.engine.begin(to_consumer, text)
        assert load is not None
        return load

    @property
    def page_count(self):
        return self.engine.tally["pages_total.written"]


@pytest.fixture
def meeting(world):
    peer = world.peer(**PUSH, lease_s=60.0)
    return Meeting(peer, world.engine(**PUSH, read_deadline_s=4.0))


def test_pages_come_while_the_prefill_runs(meeting):
    engine, before = meeting.engine, meeting.page_count
    load = meeting.start("text", 64)
    for tokens, pages in ((64, 1), (192, 3), (398, 6)):
        meeting.peer.ask("compute", tokens)
        engine.wait(lambda count=pages: meeting.page_count - before == count)
    meeting.peer.ask("compute", TOKENS)
    assert engine.end(load) is True
    released = []
    engine.wait(lambda: released.extend(meeting.peer.ask("ended")) or len(released) == 2)
    assert meeting.peer.ask("held_blocks") == 0
    assert engine.worker.rank.taken_count == 0


def test_a_prefill_that_is_aborted_costs_its_load_and_no_other(meeting):
    load = meeting.start("text", 64)
    meeting.peer.ask("compute", 192)
    meeting.peer.ask("abort")
    assert meeting.engine.end(load) is False
    params = meeting.peer.ask("prefill", "next", TOKENS, 128)
    assert meeting.engine.load(params, "next") is True


def test_a_producer_that_is_killed_while_it_pushes(meeting, world):
    engine = meeting.engine
    load = meeting.start("text", 64)
    meeting.peer.ask("compute", 192)
    meeting.peer.kill()
    assert engine.end(load) is False
    engine.wait(lambda: engine.worker.rank.taken_count == 0)
    other = world.peer(**PUSH)
    assert engine.load(other.ask("prefill", "other", TOKENS, 0), "other") is True


def test_a_producer_that_stands_still_keeps_its_slots_in_quarantine(meeting):
    """And when it goes on, it is told to stop, and they are free."""
    engine, peer = meeting.engine, meeting.peer
    load = meeting.start("text", 64)
    peer.ask("compute", 192)
    peer.process.send_signal(signal.SIGSTOP)
    assert engine.end(load) is False
    assert engine.worker.rank.out_count == engine.worker.rank.taken_count > 0
    before = bytes(engine.group._buffer.view)
    peer.process.send_signal(signal.SIGCONT)
    peer.ask("compute", TOKENS)
    engine.wait(lambda: engine.worker.rank.taken_count == 0)
    assert bytes(engine.group._buffer.view) == before
    assert engine.load(peer.ask("prefill", "next", TOKENS, 128), "next") is True


def test_engines_of_two_directions_refuse_each_other(world):
    peer, engine = world.peer(**PUSH), world.engine()
    assert engine.load(peer.ask("prefill", "a", TOKENS, 0), "a") is None
    assert engine.tally["requests_total.foreign"] == 1
    peer, engine = world.peer(), world.engine(**PUSH)
    assert engine.load(peer.ask("prefill", "a", TOKENS, 0), "a") is None
    assert engine.tally["requests_total.foreign"] == 1
