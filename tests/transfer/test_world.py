"""The simulated world of the transfer connector holds, by seed; everything happened in it; and what
it should catch it does.

A run that fails is replayed with `python -m kvferry.testing.transfer_world --seed N --steps 1000`.
"""

from collections import Counter

import pytest

pytest.importorskip("kvferry._native", reason="keys of prompts need the native extension")

from kvferry.errors import InternalError
from kvferry.testing.transfer_world.world import World
from kvferry.testing.world.checks import Failed
from kvferry.transfer import claims, consumer, consumer_rank, lease, producer_rank

STEPS = 1000
SEEDS = 40
SEEDS_EACH = 8

HAPPENED = (
    *(f"client {kind}" for kind in ("honest", "longer", "other text", "salt", "forged")),
    *(f"abort {phase}" for phase in ("waiting", "loading", "running")),
    "offer that nobody takes",
    "load done",
    "load failed",
    "message lost",
    "message doubled",
    "pause producer",
    "pause consumer",
    "absence",
    "jump",
    "cut",
    "junk",
    "restart producer",
    "restart consumer",
    "freeze producer",
    "never returned",
    "leases_total.no_room",
    "leases_ended_total.expired",
    "leases_ended_total.released",
    "confirmations_total.asked",
    "confirmations_total.confirmed",
    "late_reads_total",
    "reads_total.lost",
    "sessions_lost_total",
    "messages_dropped_total.foreign",
    *(f"claims_refused_total.{r}" for r in ("gone", "late", "restarted", "unreachable")),
    *(f"loads_total.{r}" for r in ("done", "dropped", "expired", "late", "lost", "gone")),
    *(
        f"requests_total.{outcome}"
        for outcome in (
            "loaded",
            "failed",
            "aborted",
            "declined",
            "forged",
            "unsigned",
            "other_text",
            "local_hit",
            "short",
            "over",
        )
    ),
)


def run(seeds: range, steps: int = STEPS) -> Counter:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed)
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
    """A world in which nothing is loaded, lost or late shows nothing."""
    counts = happened or run(range(SEEDS))
    assert [name for name in HAPPENED if counts[name] == 0] == []


def test_a_seed_replays():
    assert run(range(7, 8)) == run(range(7, 8))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 50))
def test_thousands_of_worlds(first):
    run(range(first, first + 50), steps=2000)


# What the checkers are for: without each of these the world is found out.


def without_validity(patch):
    """What was read is taken, however late."""
    patch.setattr(lease.HeldUntil, "is_sure", lambda self, now_s: True)


def without_confirmation(patch):
    """A late read is taken if the lease was there once."""

    def hasty(self):
        for _, chunk in self._confirming:
            self._landed.append(chunk)
        self._confirming = []

    patch.setattr(consumer_rank.ConsumerRank, "_settle_confirmations", hasty)


def with_shortened_leases(patch):
    """The producer promises more than it keeps."""
    answer = lease.LeaseBook._answer

    def generous(self, claim, held):
        grant = answer(self, claim, held)
        return lease.Grant(
            grant.sender,
            grant.serial,
            grant.transfer,
            grant.generation,
            grant.state,
            grant.valid_s * 5,
            grant.token_count,
            grant.tables,
        )

    patch.setattr(lease.LeaseBook, "_answer", generous)


def without_load_deadline(patch):
    def patient(self):
        with self._lock:
            self._end_what_is_over()
            ended, self._ended = self._ended, []
        done = frozenset(job.load.request_id for job in ended)
        failed = frozenset(job.load.request_id for job in ended if job.failure)
        return consumer_rank.Finished(done, failed)

    patch.setattr(consumer_rank.ConsumerRank, "collect", patient)


def without_key_check(patch):
    """An offer is good for whatever text it comes with."""
    patch.setattr(consumer, "_is_about", lambda offer, key: True)


def without_expiry(patch):
    patch.setattr(lease.LeaseBook, "end_expired", lambda self: None)


def with_hidden_failures(patch):
    collect = consumer_rank.ConsumerRank.collect

    def cheerful(self):
        return consumer_rank.Finished(collect(self).done, frozenset())

    patch.setattr(consumer_rank.ConsumerRank, "collect", cheerful)


def with_reports_repeated(patch):
    ended = producer_rank.ProducerRank.take_ended

    def repeating(self):
        self.last = ended(self) or getattr(self, "last", set())
        return set(self.last)

    patch.setattr(producer_rank.ProducerRank, "take_ended", repeating)


def with_talking_scheduler(patch):
    """The worker's engine thread sends claims itself."""
    begin = consumer_rank.ConsumerRank.begin

    def eager(self, plan):
        begin(self, plan)
        self.step()

    patch.setattr(consumer_rank.ConsumerRank, "begin", eager)


def with_lost_grants(patch):
    """Grants are not reported."""
    patch.setattr(claims.Claims, "_tell", lambda self, transfer: None)
    patch.setattr(consumer.Consumer, "_advance", lambda self, record: None)


BROKEN = [
    (without_validity, "a"),
    (without_confirmation, "a"),
    (with_shortened_leases, "a"),
    (without_key_check, "a"),
    (with_hidden_failures, "a"),
    (with_reports_repeated, "c"),
    (without_load_deadline, "d"),
    (without_expiry, "d"),
    (with_lost_grants, "d"),
    (with_talking_scheduler, "e"),
]


@pytest.mark.parametrize(("breaks", "checker"), BROKEN, ids=[b.__name__ for b, _ in BROKEN])
def test_what_is_broken_is_found(monkeypatch, breaks, checker):
    breaks(monkeypatch)
    with pytest.raises((Failed, InternalError)) as found:
        run(range(100, 140))
    assert found.value.checker == checker
