"""The simulated world on 3FS: what holds over memory holds over rings, and nothing is left behind.

Completions come in any order and late, and the daemon fails I/Os, beneath the seeded faults of the
world itself. Threads are real, so a seed replays but for their order.
"""

from collections import Counter
from functools import partial

import pytest

pytest.importorskip("kvferry._native")
from kvferry.offload.worker import store_jobs
from kvferry.testing.world.checks import Failed
from kvferry.testing.world.world import World

from .usrbio_disk import UsrbioDisk

STEPS = 800
ERRORS = ("eio", "eremoteio", "eintr", "enospc", "late", "fewer", "implicit")
ERRORS_OFTEN = ("enospc", "late", "fewer", "implicit")


def run(emulation, seeds: range, steps: int = STEPS) -> Counter:
    counts: Counter[str] = Counter()
    before = {name: emulation.count(name) for name in ERRORS}
    for seed in seeds:
        world = World(seed, partial(UsrbioDisk, emulation))
        try:
            world.run(steps)
        except Exception as error:
            error.add_note("\n".join([f"seed {seed}, {steps} steps:", *world.events]))
            raise
        finally:
            world.storage.close()
        counts.update(world.counts)
    counts.update({name: emulation.count(name) - before[name] for name in ERRORS})
    return counts


def _require(counts: Counter, *names: str) -> None:
    assert [name for name in names if counts[name] == 0] == []


HAPPENED = (
    "kvferry_loaded_tokens_total",
    "kvferry_stored_tokens_total",
    "kvferry_store_drops_total{io_error}",
    "kvferry_store_drops_total{no_space}",
    "crash",
    "damage",
    *ERRORS_OFTEN,
)
FAILED_LOADS = tuple(
    f"kvferry_load_failures_total{{{reason}}}" for reason in ("io_error", "corrupt", "late")
)


def test_the_five_checkers_are_content(emulation):
    _require(run(emulation, range(570, 582)), *HAPPENED)
    assert emulation.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, 50))
def test_hundreds_of_worlds(emulation, first):
    counts = run(emulation, range(first, first + 50), steps=2000)
    _require(counts, *HAPPENED, *ERRORS, *FAILED_LOADS)
    assert emulation.left_over() == []


@pytest.mark.slow
def test_the_world_finds_out_that_staging_came_back_too_early(emulation, monkeypatch):
    after_gather = store_jobs.StoreJobs._after_gather

    def hasty(self, job):
        after_gather(self, job)
        if job.staging_address is not None:
            self._staging.give_back(job.staging_address)

    monkeypatch.setattr(store_jobs.StoreJobs, "_after_gather", hasty)
    monkeypatch.setattr(store_jobs.StoreJobs, "_release", lambda self, job: None)
    with pytest.raises(Failed):
        run(emulation, range(100))
