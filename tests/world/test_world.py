"""The simulated world holds, by seed; everything happened in it; and what it should catch it does.

A run that fails is replayed with `python -m kvferry.testing.world --seed N --steps 800`.
"""

from collections import Counter
from dataclasses import replace

import pytest

from kvferry.catalog import memory_book
from kvferry.catalog.base import Quota
from kvferry.catalog.quotas import Ledger
from kvferry.keys import tenant_id
from kvferry.offload.scheduler import cost, due, planner
from kvferry.offload.scheduler.agreement import Agreement
from kvferry.offload.scheduler.origin import Origins
from kvferry.offload.worker import load_jobs, store_jobs
from kvferry.pages import memory
from kvferry.pages.base import Outcome, Result
from kvferry.testing.catalog_faults import CatalogFault
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.faults import Fault
from kvferry.testing.world import engine, shape, world
from kvferry.testing.world.checks import Failed, SimClock
from kvferry.testing.world.requests import SimRequest
from kvferry.testing.world.sibling import Sibling
from kvferry.testing.world.world import World

STEPS = 800
SEEDS = range(570, 750)
SEEDS_EACH = 10

HAPPENED = (
    "answered",
    "preemption",
    "abort",
    "abort_loading",
    "asked_again",
    "load_tokens",
    "load_in_part",
    "load_in_vain",
    "local_hit_tokens",
    "sibling_load",
    "mixed",
    "sibling_unsure",
    "fences",
    "pause",
    "time_jump",
    "proven_slices",
    "published",
    "crash",
    "reset",
    "damage",
    "lose catalog",
    "restore catalog",
    "fill disk",
    "kvferry_loaded_tokens_total",
    "kvferry_loads_declined_total{cost}",
    "kvferry_stored_tokens_total",
    "kvferry_evictions_total",
    "kvferry_quota_evictions_total",
    "kvferry_quota_refusals_total",
    "kvferry_evictions_of_bad_total",
    "kvferry_segments_deleted_total",
    "kvferry_reservations_expired_total",
    "kvferry_breaker_openings_total",
    *(
        f"kvferry_store_drops_total{{{reason}}}"
        for reason in (
            "fenced",
            "rewritten",
            "expired",
            "late",
            "no_slot",
            "no_space",
            "io_error",
            "no_staging",
            "unavailable",
            "reset",
        )
    ),
    *(
        f"kvferry_load_failures_total{{{reason}}}"
        for reason in ("absent", "foreign", "corrupt", "short", "io_error", "late", "reset")
    ),
    *(
        f"kvferry_lookups_total{{{outcome}}}"
        for outcome in ("hit", "miss", "late", "unavailable", "skipped")
    ),
    *(f"kvferry_events_total{{{outcome}}}" for outcome in ("stored", "removed", "dropped")),
    *(f"CatalogFault.{fault.name}" for fault in CatalogFault),
    *(f"Fault.{fault.name}" for fault in Fault),
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


def run_varied(first: int, monkeypatch) -> Counter:
    """Some worlds, with what else only larger ones would do."""
    with monkeypatch.context() as patch:
        if first // SEEDS_EACH % 2:  # engines with many more requests
            patch.setattr(due, "MANY_REQUESTS", 1)
            patch.setattr(planner, "TOGETHER_TOKENS", 64)
        else:  # or that live longer, and have longer prompts
            patch.setattr(cost, "TRIAL_EVERY_S", 0.02)
            for module in (cost, planner):
                patch.setattr(module, "PREFILL_TOKENS_MIN", 16)
        return run(range(first, first + SEEDS_EACH))


@pytest.mark.parametrize("first", SEEDS[::SEEDS_EACH])
def test_all_checkers_are_content(happened, first, monkeypatch):
    happened.update(run_varied(first, monkeypatch))


def test_everything_happened(happened, monkeypatch):
    """A world in which nothing is loaded, nothing fails and nobody is preempted shows nothing."""
    counts = happened
    if not counts:  # alone
        for first in SEEDS[::SEEDS_EACH]:
            counts.update(run_varied(first, monkeypatch))
    assert [name for name in HAPPENED if counts[name] == 0] == []


def test_a_seed_replays(happened):
    assert run(range(7, 8)) == run(range(7, 8))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 50))
def test_thousands_of_worlds(first):
    run(range(first, first + 50), steps=2000)


def flooded(patch):
    """Two tenants share a small store, of which one is guaranteed half; pages age quickly."""
    tenancy = shape.Tenancy(4, ("one", "two"), [Quota(tenant_id("one"), 2)])
    patch.setattr(memory_book, "AGE_STEP_S", 0.01)
    patch.setattr(world, "draw_tenancy", lambda chance, count: tenancy)


def test_a_tenant_that_floods_takes_nothing_that_another_is_guaranteed(monkeypatch):
    flooded(monkeypatch)
    counts = run(range(2 * SEEDS_EACH))
    assert counts["kvferry_quota_evictions_total"] > 0


# What the checkers are for: without each of these the world is found out.


def without_fence(patch):
    patch.setattr(store_jobs.StoreJobs, "fence", lambda self, overwritten: None)


def without_giving_up(patch):
    """A gather that is not done in time is trusted to have been."""
    patch.setattr(store_jobs.StoreJobs, "_give_up", lambda self, jobs: None)


def without_loss(patch):
    """What the engine rewrote before it said so is stored all the same."""
    patch.setattr(store_jobs.StoreJobs, "lose", lambda self, rewritten: None)


def without_verification(patch):
    read = memory.MemoryPages._read

    def trusting(self, job, index, extent):
        result = read(self, job, index, extent)
        if result.outcome not in (Outcome.CORRUPT, Outcome.FOREIGN):
            return result
        slices = memory._slices(extent, memory._buffer(extent))
        checksums = tuple(self._digest(payload) for _, _, payload in slices)
        return Result(job, index, Outcome.OK, checksums=checksums)

    patch.setattr(memory.MemoryPages, "_read", trusting)


def without_proofs(patch):
    """A copier that proves pages scatters what is damaged."""
    patch.setattr(ReferenceCopier, "_checksums", lambda self, piece: piece.checksums)


def without_origins(patch):
    patch.setattr(Origins, "are_ours", lambda self, tables, end_tokens: True)


def without_new_namespace(patch):
    patch.setattr(Agreement, "rename", lambda self, name: None)


def without_guarantees(patch):
    flooded(patch)
    patch.setattr(Ledger, "may_lose", lambda self, share, to=None: True)
    patch.setattr(Ledger, "_claimed", lambda self, owner: 0)


def with_early_staging(patch):
    """The slot is given back when the bytes are gathered, not when they are written."""
    after_gather = store_jobs.StoreJobs._after_gather

    def hasty(self, job):
        after_gather(self, job)
        if job.staging_address is not None:
            self._staging.give_back(job.staging_address)

    patch.setattr(store_jobs.StoreJobs, "_after_gather", hasty)
    patch.setattr(store_jobs.StoreJobs, "_release", lambda self, job: None)


def with_unaccepted_tokens(patch):
    """Finished requests store up to their last token, whose KV was never computed."""

    def greedy(self, request_id, tables=None):
        record = self._records.pop(request_id, None)
        if record is not None and tables is not None and record.is_storable:
            self._store_late(record, tables, len(record.request.tokens))

    patch.setattr(planner.Planner, "finished", greedy)


def without_load_deadline(patch):
    def patient(self):
        with self._lock:
            ended, self._ended = self._ended, []
            bad_pages, self._bad_pages = self._bad_pages, []
        return ended, bad_pages

    patch.setattr(load_jobs.LoadJobs, "collect", patient)


def with_hidden_failures(patch):
    patch.setattr(load_jobs.LoadJob, "has_failed", property(lambda self: False))


def with_waiting_scheduler(patch):
    build = planner.Planner.build

    def slow(self, step):
        self._clock.sleep(0.001)
        return build(self, step)

    patch.setattr(planner.Planner, "build", slow)


def with_forgotten_record(patch):
    patch.setattr(planner.Planner, "finished", lambda self, request_id, tables=None: None)


@pytest.mark.parametrize(
    ("mutation", "checker"),
    [
        (without_fence, "a"),
        (without_giving_up, "a"),
        (without_loss, "a"),
        (without_verification, "a"),
        (without_proofs, "a"),
        (without_origins, "a"),
        (without_new_namespace, "a"),
        (with_early_staging, "ad"),
        (with_unaccepted_tokens, "a"),
        (with_hidden_failures, "a"),
        (without_load_deadline, "d"),
        (with_forgotten_record, "d"),
        (with_waiting_scheduler, "e"),
        (without_guarantees, "f"),
    ],
)
def test_the_world_finds_out(monkeypatch, mutation, checker):
    mutation(monkeypatch)
    with pytest.raises(Failed) as failed:
        run(range(100), steps=1000)
    assert failed.value.checker in checker


def test_a_clock_that_is_asked_to_sleep_in_the_scheduler_says_so():
    clock = SimClock(0)
    clock.sleep(1.0)
    with pytest.raises(Failed), clock.scheduling():
        clock.sleep(1.0)


class Jam(Sibling):
    """The first request has its answer when the second, behind it, loads what leaves it no room."""

    def match(self, request, computed_tokens):
        is_first = request.request_id == "first"
        if is_first and not self._load_count:
            return None
        return 0 if is_first else 60 - computed_tokens

    def is_prompt(self):
        return False


@pytest.fixture
def jammed(monkeypatch):
    def narrow(chance, model, tenant):
        setup = shape.draw_setup(chance, model, tenant)
        changes = {"takes_loaded_first": False, "is_sibling_first": True, "tp": 1}
        return replace(setup, block_count=25 * len(model.groups), **changes)

    monkeypatch.setattr(world, "draw_setup", narrow)
    monkeypatch.setattr(engine, "Sibling", Jam)
    jammed = World(0)
    del jammed.engines[1:]
    for number, name in enumerate(("first", "second")):
        request = SimRequest(name, [number] * 64, 2, b"")
        request.is_cacheable = False
        jammed.engines[0].add(request)
    return jammed


def test_one_that_has_no_room_lets_loads_by_that_have_ended(jammed):
    jammed.run(0)
    assert jammed.counts["answered"] == 2
    assert jammed.counts["sibling_load"] == 1


def test_else_both_would_wait_for_ever(jammed, monkeypatch):
    """As in vLLM before 0.32: nobody runs, and what was loaded holds the blocks."""
    monkeypatch.setattr(planner.Planner, "_note_jam", lambda self, step: None)
    with pytest.raises(Failed, match="did not come to rest"):
        jammed.run(0)


THRASHING_SEED = 1256
"""One request takes the last blocks, has no room for its first answer, gives them up, and takes
them again; two that were loaded hold the others."""


def test_one_that_gives_up_its_blocks_lets_loads_by_that_have_ended():
    run(range(THRASHING_SEED, THRASHING_SEED + 1), steps=2000)


def test_else_it_would_take_them_again_for_ever(monkeypatch):
    monkeypatch.setattr(planner.Planner, "_has_loaded", lambda self: False)
    with pytest.raises(Failed, match="did not come to rest"):
        run(range(THRASHING_SEED, THRASHING_SEED + 1), steps=2000)
