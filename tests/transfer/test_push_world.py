"""The simulated world of a push holds, by seed; everything happened in it; and what it should catch
it does.

A run that fails is replayed with
`python -m kvferry.testing.transfer_world.pushing --seed N --steps 1000`.
"""

from collections import Counter

import pytest

pytest.importorskip("kvferry._native", reason="keys of prompts need the native extension")

from kvferry.errors import InternalError
from kvferry.testing.transfer_world.pushing import PushWorld
from kvferry.testing.world.checks import Failed
from kvferry.transfer import pushes, unload
from kvferry.transfer.producer_rank import ProducerRank

STEPS = 1000
SEEDS = 80
SEEDS_EACH = 20

HAPPENED = (
    *(f"appointment, {kind}" for kind in ("both", "no producer", "no consumer", "another prompt")),
    *(f"abort prefill {state}" for state in ("new", "running")),
    *(f"abort {phase}" for phase in ("waiting", "loading", "running")),
    "client honest",
    "client forged",
    "preempted",
    "load done",
    "load failed",
    "message lost",
    "message doubled",
    "pause producer",
    "absence",
    "cut",
    "junk",
    "restart producer",
    "restart consumer",
    "freeze producer",
    "never returned",
    "leases_ended_total.expired",
    "leases_ended_total.released",
    "leases_ended_total.cancelled",
    "leases_total.no_room",
    *(f"pages_total.{outcome}" for outcome in ("written", "not_written", "lost")),
    *(f"loads_total.{outcome}" for outcome in ("done", "dropped", "late", "lost", "refused")),
    "torn_pages_total",
    "requests_total.quarantine",
)


def run(seeds: range, steps: int = STEPS) -> Counter:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = PushWorld(seed)
        try:
            world.run(steps)
        except Exception as error:
            error.add_note("\n".join([f"seed {seed}, {steps} steps:", *world.events]))
            raise
        counts.update(world.counts)
    return counts


@pytest.fixture(scope="module")
def happened() -> Counter:
    """What happened in all runs of this module."""
    return Counter()


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_EACH))
def test_all_five_checkers_are_content(happened, first):
    happened.update(run(range(first, first + SEEDS_EACH)))


def test_everything_happened(happened):
    """A world in which nothing is pushed, lost or late shows nothing."""
    counts = happened or run(range(SEEDS))
    assert [name for name in HAPPENED if counts[name] == 0] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 50))
def test_thousands_of_worlds(first):
    run(range(first, first + 50), steps=2000)


# What the checkers are for: without each of these the world is found out.


def without_proofs(patch):
    """A page is what its producer says."""
    patch.setattr(unload.PageUnloader, "_is_proven", lambda self, chunk: True)


def without_second_proof(patch):
    """A page that was right before it was scattered was right while it was."""

    def hasty(self):
        through, self._torn = self._torn, []
        return through + [self._scatters.pop(done.job) for done in self._scatterer.poll()]

    patch.setattr(unload.PageUnloader, "step", hasty)


def with_withdrawals_unheard(patch):
    """Blocks that were taken from a prefill are gathered as if they were its own."""
    patch.setattr(pushes.Pushes, "withdraw", lambda self, request_id: None)


def with_gathers_seen_too_late(patch):
    """What was gathered is taken, whatever happened meanwhile."""
    patch.setattr(pushes.Pushes, "_gathered", pushes.Pushes._write)


def with_tokens_before_they_are_computed(patch):
    begin = ProducerRank.begin

    def eager(self, plan):
        begin(self, plan)
        self._grow()

    patch.setattr(ProducerRank, "begin", eager)


def without_key_check(patch):
    """Whoever knows a transfer gets it, whatever his prompt is."""
    is_sound = pushes.Pushes._is_sound
    patch.setattr(
        pushes.Pushes,
        "_is_sound",
        lambda self, page, source, key: is_sound(self, page, source, source.key),
    )


def without_stops(patch):
    """What consumers do not want any more is never given back."""
    patch.setattr(pushes.Pushes, "_stop", lambda self, stop, number: None)


def with_answers_once(patch):
    """An answer that was lost is lost."""
    send = ProducerRank._send

    def once(self, reader, body):
        self.told = getattr(self, "told", set())
        number = getattr(body, "number", None)
        if number is None or (reader, number) not in self.told:
            send(self, reader, body)
        self.told.add((reader, number))

    patch.setattr(ProducerRank, "_send", once)


def with_early_ends_reported(patch):
    """vLLM is told of a lease that ends while its request still runs."""
    take_news = ProducerRank._take_news

    def hasty(self, plan, pushed):
        take_news(self, plan, pushed)
        self._running.clear()

    patch.setattr(ProducerRank, "_take_news", hasty)


BROKEN = [
    (without_proofs, "a"),
    (without_second_proof, "a"),
    (with_withdrawals_unheard, "a"),
    (with_gathers_seen_too_late, "a"),
    (with_tokens_before_they_are_computed, "a"),
    (without_key_check, "a"),
    (with_early_ends_reported, "c"),
    (without_stops, "d"),
    (with_answers_once, "d"),
]


@pytest.mark.parametrize(("breaks", "checker"), BROKEN, ids=[b.__name__ for b, _ in BROKEN])
def test_what_is_broken_is_found(monkeypatch, breaks, checker):
    breaks(monkeypatch)
    with pytest.raises((Failed, InternalError)) as found:
        run(range(100, 200))
    assert found.value.checker == checker
