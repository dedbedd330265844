"""One consumer rank and one producer rank over a link that does as told: what is read is used only
if it is sure, and nothing is used again too early."""

import threading

import msgspec
import pytest

from kvferry.device.base import SKIP
from kvferry.errors import IncompatibleError, UnavailableError
from kvferry.transfer import consumer_rank
from kvferry.transfer.halves import Load, Report, Watch
from kvferry.transfer.memory import Motion
from kvferry.transfer.messages import Claim
from kvferry.transfer.mover import Mover
from kvferry.transfer.params import Offer
from tests.transfer.rig import OTHER_SHAPE, SETTINGS, TOKENS, Rig


@pytest.fixture(params=[None, OTHER_SHAPE], ids=["straight", "through pages"])
def rig(request):
    return Rig(target_shape=request.param)


@pytest.fixture
def paged_rig():
    return Rig(target_shape=OTHER_SHAPE)


def test_a_load_brings_the_bytes_and_lets_the_producer_go_on(rig):
    rig.granted()
    rig.load("r", (1, 2))
    rig.rounds()
    assert rig.outcome("r") and rig.holds((1, 2))
    rig.rounds(5, step_s=0.1)
    assert rig.source_rank.take_ended() == {"text"}
    assert rig.rank.is_idle


def ends_with_rounds(rig, wait):
    """Whether the wait ends when the movers go on, and not before."""
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.1)
    is_waiting = waiting.is_alive()
    for _ in range(10):
        rig.step_movers()
    waiting.join(20.0)
    return is_waiting and not waiting.is_alive()


def test_a_step_that_computes_nothing_leaves_the_interpreter_to_the_mover(rig, monkeypatch):
    """Until there is a grant, and until the load has ended; not at all where it is the engine's
    turn."""
    monkeypatch.setattr(consumer_rank, "NEWS_WAIT_S", 60.0)
    rig.rank.wait()
    rig.plan(watches=[Watch("r", rig.hold())])
    assert ends_with_rounds(rig, rig.rank.wait)
    assert rig.rank.report().granted == ("r",)
    rig.rank.wait()
    rig.load("r", (1, 2))
    assert ends_with_rounds(rig, rig.rank.wait)
    assert rig.rank.collect().done == {"r"}
    rig.rank.wait()


def test_a_part_is_loaded_behind_what_is_there(rig):
    rig.granted()
    rig.target_group.write(1, 0, "mine")
    rig.plan(loads=[Load("r", ((SKIP, 2),), 4, TOKENS)])
    rig.rounds()
    assert rig.outcome("r")
    assert rig.target_group.holds(1, 0, "mine") and rig.target_group.holds(2, 1, "text")


def test_staging_of_a_read_that_was_given_up_is_nobody_elses(rig):
    """It is still being written to: bytes of one request would become those of another."""
    rig.granted()
    rig.script.motion = Motion.WAIT
    rig.load("r", (1, 2))
    rig.rounds()
    rig.plan(drops=["r"])
    rig.rounds()
    assert rig.outcome("r") is False
    assert rig.rank.taken_count == rig.rank.out_count == 1
    rig.granted("s", name="other", blocks=(5, 6))
    rig.load("s", (7, 8))
    rig.rounds(3)
    assert rig.rank.taken_count == rig.rank.out_count == 2
    rig.script.motion = Motion.END
    rig.rounds()
    assert rig.outcome("s") and rig.holds((7, 8), "other")
    rig.rounds(5, step_s=0.1)
    assert rig.rank.is_idle and rig.rank.taken_count == 0


def test_with_too_much_in_quarantine_nothing_begins(rig):
    for name in ("r", "s"):
        rig.granted(name, name=name, blocks=(3, 4))
    rig.script.motion = Motion.WAIT
    for name, blocks in (("r", (1, 2)), ("s", (5, 6))):
        rig.load(name, blocks)
        rig.rounds()
        rig.plan(drops=[name])
        rig.rounds()
    assert rig.report.is_full
    rig.script.motion = Motion.WAIT
    rig.granted("t", name="t")
    rig.load("t", (7, 8))
    rig.rounds()
    assert rig.outcome("t") is False
    rig.report = Report()
    rig.script.motion = Motion.END
    rig.rounds()
    assert not rig.rank.report().is_full
    assert rig.tally["loads_total.quarantine"] == 1


def test_blocks_are_the_loads_while_they_are_being_written(rig):
    """Reported earlier they would be another request's while the copier is at them."""
    rig.granted()
    rig.load("r", (1, 2))
    scatterer = rig.copiers[-1]
    scatterer.is_stuck = True
    rig.rounds()
    rig.plan(drops=["r"])
    rig.rounds(3, step_s=20.0)
    assert rig.outcome("r") is None
    scatterer.is_stuck = False
    rig.rounds()
    assert rig.outcome("r") is False


def test_a_load_that_failed_while_it_was_gathered_is_not_scattered(paged_rig):
    paged_rig.granted()
    gatherer, _ = paged_rig.copiers
    gatherer.is_stuck = True
    paged_rig.load("r", (1, 2))
    paged_rig.rounds()
    paged_rig.plan(drops=["r"])
    paged_rig.rounds()
    gatherer.is_stuck = False
    paged_rig.rounds()
    assert paged_rig.outcome("r") is False
    assert not paged_rig.target_group.holds(1, 0, "text")


def test_pages_that_are_in_use_count_as_staging_does(paged_rig):
    """A rank with a page out is not idle: a leak of pages would not be seen."""
    paged_rig.granted()
    gatherer, _ = paged_rig.copiers
    gatherer.is_stuck = True
    paged_rig.load("r", (1, 2))
    paged_rig.rounds()
    assert paged_rig.rank.out_count == 0
    assert paged_rig.rank.taken_count == 2, "the slot that was read into, and the page"
    gatherer.is_stuck = False
    paged_rig.rounds()
    assert paged_rig.outcome("r") and paged_rig.rank.taken_count == 0


def test_the_deadline_holds_whatever_the_link_does(rig):
    rig.granted()
    rig.script.motion = Motion.WAIT
    rig.load("r", (1, 2))
    rig.rounds()
    rig.clock.advance(SETTINGS.read_deadline_s + 1)
    rig.collect()  # the mover hangs: the engine's thread alone must see it
    assert rig.outcome("r") is False


def test_after_a_loss_staging_rests_and_the_peer_is_met_again(rig):
    rig.granted()
    rig.script.motion = Motion.LOSE
    rig.load("r", (1, 2))
    rig.rounds()
    assert rig.outcome("r") is False
    assert rig.rank.taken_count == 1
    rig.script.motion = Motion.END
    rig.rounds(10, step_s=0.2)
    rig.granted("s", name="other", blocks=(5, 6))
    rig.load("s", (7, 8))
    rig.rounds()
    assert rig.outcome("s") and rig.holds((7, 8), "other")
    rig.rounds(10, step_s=0.5)
    assert rig.rank.taken_count == 0


def late_read(rig):
    """A read that ends after everything that this side knows of the lease."""
    rig.granted()
    rig.script.motion = Motion.WAIT
    rig.load("r", (1, 2))
    rig.rounds()
    rig.script.mute = {rig.source_link.name}
    rig.rounds(6, step_s=2.0)
    rig.script.motion = Motion.END
    rig.rounds(1)
    assert rig.outcome("r") is None
    assert rig.tally["confirmations_total.asked"] == 1


def test_a_late_read_counts_if_the_producer_still_holds_it(rig):
    late_read(rig)
    rig.script.mute = set()
    rig.rounds()
    assert rig.outcome("r") and rig.holds((1, 2))


def test_a_late_read_fails_if_the_producer_does_not_hold_it_any_more(rig):
    """The hole through which requests were answered with other users' text."""
    late_read(rig)
    rig.script.mute |= {rig.link.name}
    rig.rounds(12, step_s=1.0)
    assert rig.source_rank.take_ended() == {"text"}
    rig.script.mute = set()
    rig.rounds()
    assert rig.outcome("r") is False
    assert not rig.target_group.holds(1, 0, "text")
    assert rig.tally["late_reads_total"] == 1


def test_an_answer_from_before_the_end_of_the_read_confirms_nothing(rig):
    rig.granted()
    rig.script.motion = Motion.WAIT
    rig.load("r", (1, 2))
    rig.rounds()
    rig.script.mute = {rig.source_link.name}
    rig.rounds(6, step_s=2.0)
    rig.script.mute = set()
    rig.source_mover.step()
    rig.script.mute = {rig.link.name, rig.source_link.name}
    rig.script.motion = Motion.END
    rig.rounds(3)
    assert rig.outcome("r") is None


def test_leases_are_renewed_as_the_producer_has_set_them():
    """Its own settings do not know them: a short lease would be over before it is renewed."""
    rig = Rig(source_settings=msgspec.structs.replace(SETTINGS, lease_s=1.0))
    rig.granted()
    rig.rounds(40, step_s=0.1)
    assert rig.source_rank.take_ended() == set()
    rig.load("r", (1, 2))
    rig.rounds()
    assert rig.outcome("r") and rig.holds((1, 2))


def test_siblings_share_a_transfer_and_the_last_one_lets_go(rig):
    offer = rig.granted("r 0")
    rig.plan(watches=[Watch("r 1", offer)])
    rig.load("r 0", (1, 2))
    rig.rounds(10, step_s=0.1)
    assert rig.outcome("r 0")
    assert rig.source_rank.take_ended() == set()
    rig.load("r 1", (5, 6))
    rig.rounds(10, step_s=0.1)
    assert rig.outcome("r 1") and rig.holds((5, 6))
    assert rig.source_rank.take_ended() == {"text"}


def test_a_transfer_is_used_once(rig):
    offer = rig.granted()
    rig.load("r", (1, 2))
    rig.rounds(10, step_s=0.1)
    rig.plan(watches=[Watch("again", offer)])
    rig.rounds()
    assert ("again", "over") in rig.report.refused


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (UnavailableError("transfer.dial", "nobody"), "unreachable"),
        (IncompatibleError("transfer.fields", "kv_dtype"), "foreign"),
    ],
)
def test_who_cannot_be_met_is_refused_at_once(rig, answer, reason):
    rig.answers = [answer]
    rig.plan(watches=[Watch("r", rig.hold())])
    rig.rounds()
    assert rig.report.refused == (("r", reason),)


def test_one_failure_is_not_for_ever(rig):
    rig.answers = [UnavailableError("transfer.dial", "nobody")]
    rig.plan(watches=[Watch("r", rig.hold())])
    rig.rounds(10, step_s=0.2)
    rig.granted("s", name="other")


def test_who_answers_at_an_address_is_the_only_one_there(rig):
    """The old boot's requests fail over at once; its state does not pile up."""
    rig.granted("old")
    rig.source_link.close(0.0)
    rig.start_producer()
    rig.granted("new", name="other")
    rig.rounds(5, step_s=0.1)
    assert ("old", "restarted") in rig.report.refused
    assert [peer.boot for peer in rig.peers] == [rig.boot]


def test_a_stale_offer_does_not_retire_who_is_there(rig):
    rig.granted("r")
    stale = Offer(b"s" * 16, b"o" * 16, "host", 1, b"n" * 32, b"k" * 32, TOKENS)
    rig.plan(watches=[Watch("stale", stale)])
    rig.rounds()
    assert ("stale", "unreachable") in rig.report.refused
    rig.load("r", (1, 2))
    rig.rounds()
    assert rig.outcome("r")


def test_peers_that_nobody_wants_are_forgotten(rig):
    rig.granted()
    rig.plan(drops=["r"])
    rig.rounds(5, step_s=0.2)
    rig.clock.advance(SETTINGS.peer_idle_s)
    rig.rounds(3)
    assert list(rig.peers) == []


class Broken:
    """A link whose transport is at its end."""

    def __init__(self, link):
        self._link = link

    def poll(self):
        raise RuntimeError("what nobody expected")

    def __getattr__(self, name):
        return getattr(self._link, name)


def run_broken(rig, link, rank):
    mover = Mover(SETTINGS, rig.clock, rig.tally, Broken(link), rank)
    mover._run()
    assert mover.has_failed


def test_when_the_mover_stands_aside_every_load_ends(rig):
    """Requests that wait for a thread that is gone would wait for ever."""
    rig.granted()
    offer = rig.hold("other", (5, 6))
    rig.script.motion = Motion.WAIT
    rig.load("r", (1, 2))
    rig.rounds()
    run_broken(rig, rig.link, rig.rank)
    rig.collect()
    assert rig.outcome("r") is False
    rig.plan(watches=[Watch("s", offer)])
    rig.load("t", (7, 8))
    rig.collect()
    assert ("s", "internal") in rig.report.refused
    assert rig.outcome("t") is False


@pytest.mark.parametrize("which", [0, 1])
def test_a_copier_that_fails_ends_the_load_as_well(paged_rig, which, monkeypatch):
    """The page that it was to have is lost; the request is not."""

    def refuse(pieces):
        raise ValueError("what nobody expected")

    paged_rig.granted()
    monkeypatch.setattr(
        paged_rig.copiers[which], ("submit_gather", "submit_scatter")[which], refuse
    )
    paged_rig.load("r", (1, 2))
    paged_rig.mover._run()
    assert paged_rig.mover.has_failed
    paged_rig.collect()
    assert paged_rig.outcome("r") is False


def test_a_copier_that_fails_on_the_straight_way_ends_the_load_as_well(monkeypatch):
    rig = Rig()

    def refuse(pieces):
        raise ValueError("what nobody expected")

    rig.granted()
    monkeypatch.setattr(rig.copiers[0], "submit_scatter", refuse)
    rig.load("r", (1, 2))
    rig.mover._run()
    rig.collect()
    assert rig.outcome("r") is False


def test_a_peer_that_cannot_be_reached_yet_takes_no_memory(rig, monkeypatch):
    """It is met again and again, each time with tables that must not pile up."""
    table, attempts = rig.link.table, []

    def away(peer, strides):
        if peer is not None:
            attempts.append(peer)
            raise UnavailableError("link.peer", "it is gone")
        return table(peer, strides)

    with monkeypatch.context() as patch:
        patch.setattr(rig.link, "table", away)
        rig.plan(watches=[Watch("r", rig.hold())])
        rig.rounds(5, step_s=1.0)
    assert len(attempts) > 2 and rig.link._tables == {}
    rig.clock.advance(SETTINGS.redial_s)
    rig.granted("s", name="other")


def test_a_reader_that_died_is_not_connected_to_for_each_of_its_claims(rig, monkeypatch):
    """Each attempt costs the producer a socket that UCX never closes."""
    connect, attempts = rig.source_link.connect, []

    def gone(description):
        attempts.append(description)
        raise UnavailableError("link.connect", "connection refused")

    offers = [rig.hold(name) for name in ("a", "b", "c")]
    claims = [
        Claim("reader", b"where", serial, offer.transfer, 0, 1, True)
        for serial, offer in enumerate(offers, 1)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(rig.source_link, "connect", gone)
        for claim in claims:
            rig.source_rank.take(claim)
        assert len(attempts) == 1
        rig.clock.advance(SETTINGS.redial_s)
        rig.source_rank.take(claims[0])
        assert len(attempts) == 2
    assert rig.source_link.connect == connect
    rig.granted("r", name="d")


def test_when_the_producers_mover_stands_aside_leases_still_end(rig):
    rig.hold("a")
    rig.source_mover.step()
    run_broken(rig, rig.source_link, rig.source_rank)
    rig.hold("b")
    assert rig.source_rank.take_ended() == set()
    rig.clock.advance(SETTINGS.lease_s + 1)
    assert rig.source_rank.take_ended() == {"a", "b"}


def test_leases_end_while_the_producers_mover_hangs(rig):
    """In a transport that does not return: the engine would run out of blocks."""
    rig.hold("a")
    rig.clock.advance(SETTINGS.lease_s + 1)
    assert rig.source_rank.take_ended() == {"a"}


def test_what_is_not_sealed_is_not_heard(rig):
    rig.granted()
    for junk in (b"", b"kvfx", b"\xff" * 500):
        rig.fabric.send("stranger", rig.link.name, junk)
        rig.fabric.send("stranger", rig.source_link.name, junk)
    rig.rounds()
    assert rig.tally["messages_dropped_total.foreign"] == 6
    rig.load("r", (1, 2))
    rig.rounds()
    assert rig.outcome("r")
