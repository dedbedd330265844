"""Push, one rank on each side: what is written when, and what becomes of what comes late."""

import ctypes

import msgspec
import pytest

from kvferry.errors import IncompatibleError
from kvferry.layout import HEADER_BYTES
from kvferry.transfer.base import Stride
from kvferry.transfer.compatibility import agree, compatibility_of
from kvferry.transfer.halves import Begin, ProducerPlan, Progress, Watch
from kvferry.transfer.memory import Motion
from kvferry.transfer.params import Offer
from tests.transfer.rig import SETTINGS, TOKENS, Rig

SLOT = 1 << 14
PUSH = msgspec.structs.replace(
    SETTINGS,
    direction="push",
    staging_bytes=4 * SLOT,
    slot_bytes=SLOT,
    quarantine_bytes_max=SLOT,
    page_tokens_max=4,
    read_deadline_s=20.0,
)
BLOCKS = (3, 4)


class PushRig(Rig):
    """A prefill that takes steps. `compute` is one of the producer's engine."""

    def __init__(self):
        super().__init__(PUSH)

    def begin(self, name="text", key=b"k" * 32):
        """A prefill that has an appointment begins; the consumer's record of it."""
        transfer = self.clock.random_bytes(16)
        generation = self.clock.random_bytes(16)
        begin = Begin(name, transfer, generation, TOKENS, key)
        self.compute(ProducerPlan(begins=(begin,)))
        return Offer(transfer, self.boot, "host", 1, b"n" * 32, b"k" * 32, TOKENS)

    def compute(self, plan=None, tokens=0, name="text", blocks=BLOCKS):
        """One step, after which `tokens` are computed."""
        if plan is None:
            plan = ProducerPlan(progress=(Progress(name, tokens, (blocks,)),))
        self.source_rank.begin(plan)
        for index, block in enumerate(blocks):
            self.source_group.write(block, index, name, tokens)
        return self.source_rank.take_ended()

    def begun(self, **begin):
        """A load whose prefill has just begun."""
        offer = self.begin(**begin)
        self.plan(watches=[Watch("r", offer)])
        self.rounds()
        assert "r" in self.report.granted
        self.load("r", (1, 2))
        self.rounds()
        return offer

    @property
    def written(self):
        return self.tally["writes_total.done"]


@pytest.fixture
def rig():
    return PushRig()


def test_what_a_finished_prefill_holds_is_written(rig):
    """A router that asks one after the other."""
    rig.granted(blocks=BLOCKS)
    rig.load("r", (1, 2))
    rig.rounds()
    assert rig.outcome("r") and rig.holds((1, 2))
    assert rig.rank.taken_count == 0


def test_pages_come_as_their_tokens_are_computed(rig):
    rig.begun()
    assert rig.written == 0
    for tokens, pages in ((3, 0), (4, 1), (7, 1), (8, 2)):
        rig.compute(tokens=tokens)
        rig.rounds()
        assert rig.written == pages, f"{tokens} tokens are computed"
    assert rig.outcome("r") and rig.holds((1, 2))


def test_nothing_of_the_producer_can_be_reached(rig):
    """Push exposes only staging, and only the consumer's."""
    rig.begun()
    with pytest.raises(IncompatibleError):
        rig.link.table(rig.source_link.name, [Stride(rig.source_group.memory.address, 64, 64, 1)])


def test_what_is_gathered_and_then_taken_is_gathered_again(rig, monkeypatch):
    """Preempted while a copier reads: those bytes are another user's."""
    rig.begun()
    gatherer = next(iter(rig.source_rank._pushes._gatherers.values())).copier
    gatherer.is_stuck = True
    rig.compute(tokens=4)
    rig.rounds()
    rig.compute(ProducerPlan(withdrawn=("text",)))
    for block in BLOCKS:
        rig.source_group.write(block, 0, "another user's text")
    gatherer.is_stuck = False
    rig.rounds()
    assert rig.written == 0
    rig.compute(tokens=8, blocks=(7, 8))
    rig.rounds()
    assert rig.outcome("r") and rig.holds((1, 2))


def test_an_aborted_prefill_fails_the_load_at_once(rig):
    rig.begun()
    rig.compute(ProducerPlan(cancelled=("text",)))
    rig.rounds()
    assert rig.outcome("r") is False
    assert rig.tally["loads_total.refused"] == 1


def test_a_prefill_of_another_prompt_is_not_taken(rig):
    """An appointment that a client carried to another request."""
    rig.begun(key=b"o" * 32)
    rig.compute(tokens=8)
    rig.rounds()
    assert rig.outcome("r") is False and rig.written == 0


def test_a_slot_stays_in_quarantine_until_its_write_has_ended(rig):
    rig.begun()
    rig.script.motion = Motion.WAIT
    rig.compute(tokens=8)
    rig.rounds()
    rig.plan(drops=["r"])
    rig.rounds(30, step_s=0.1)
    assert rig.outcome("r") is False
    assert rig.rank.taken_count == rig.rank.out_count == 2
    rig.script.motion = Motion.END
    rig.rounds(30, step_s=0.1)
    assert (rig.rank.taken_count, rig.rank.out_count) == (0, 0)


def test_what_was_stopped_is_never_written(rig):
    rig.begun()
    rig.plan(drops=["r"])
    rig.rounds()
    rig.compute(tokens=8)
    rig.rounds(20, step_s=0.1)
    assert rig.written == 0 and rig.rank.taken_count == 0


def test_an_invitation_that_comes_after_its_stop_begins_nothing(rig, monkeypatch):
    """Messages have no order: the slot is somebody else's by then."""
    late, notify = [], rig.link.notify

    def hold_back(peer, content):
        if rig.invites:
            late.append((peer, content))
            return True
        return notify(peer, content)

    offer = rig.begin()
    rig.plan(watches=[Watch("r", offer)])
    rig.rounds()
    rig.invites = True
    monkeypatch.setattr(rig.link, "notify", hold_back)
    rig.load("r", (1, 2))
    rig.rounds()
    rig.invites = False
    rig.plan(drops=["r"])
    rig.rounds(3)
    assert rig.rank.taken_count == 0
    for peer, content in late:
        notify(peer, content)
    rig.compute(tokens=8)
    rig.rounds()
    assert late and rig.written == 0


def test_a_producer_that_cannot_be_reached_costs_the_load_and_a_rest(rig):
    rig.begun()
    rig.source_link.close(0.0)
    rig.start_producer()
    rig.rounds(20, step_s=0.1)
    assert rig.outcome("r") is False
    assert rig.rank.out_count == 0 and rig.rank.taken_count == 2
    rig.rounds(10, step_s=PUSH.rest_s / 5)
    assert rig.rank.taken_count == 0


def spoil_slot(rig):
    ctypes.memset(rig.rank._staging.address + HEADER_BYTES, 0x55, 64)


def test_foreign_bytes_in_a_page_are_not_scattered(rig, monkeypatch):
    rig.begun()
    take = rig.rank._reads.take

    def late(answer):
        chunk = take(answer)
        spoil_slot(rig)
        return chunk

    monkeypatch.setattr(rig.rank._reads, "take", late)
    rig.compute(tokens=4)
    rig.rounds()
    assert rig.outcome("r") is False
    assert rig.tally["loads_total.torn"] == 1
    assert not rig.target_group.holds(1, 0, "text")


def test_foreign_bytes_that_come_while_a_page_is_scattered_fail_the_load(rig):
    """It was proven before; nobody may see what is in its blocks now."""
    rig.begun()
    scatterers = [c for c in rig.copiers if c._regions == rig.target_group.layout().regions]
    scatterers[0].is_stuck = True
    rig.compute(tokens=4)
    rig.rounds()
    assert rig.outcome("r") is None
    spoil_slot(rig)
    scatterers[0].is_stuck = False
    rig.rounds()
    assert rig.outcome("r") is False
    assert rig.tally["loads_total.torn"] == 1


def test_a_push_engine_and_a_pull_engine_refuse_each_other_by_name():
    push, pull = compatibility_of({"model": "m"}, "push"), compatibility_of({"model": "m"}, "pull")
    for mine, theirs in ((push, pull), (pull, push)):
        with pytest.raises(IncompatibleError, match=r"direction: '(push|pull)', not"):
            agree(mine, theirs)
    assert agree(push, push) and agree(pull, pull)
