"""How fast a store is, is known before a request loads anything."""

import pytest

from kvferry.offload.base import Plan
from kvferry.offload.worker.trial import Trial
from tests.offload.test_jobs import NAMES, PART, Worker


@pytest.fixture
def worker():
    """Four chunks are on storage; the trial at the start found none."""
    worker = Worker(staging_slots=16)
    worker.work()
    worker.store(tuple(range(1, 9)))
    worker.work()
    assert worker.jobs.report() is None
    return worker


def test_a_trial_says_how_long_its_pages_took(worker):
    worker.jobs.before_step(Plan(NAMES, tries_store=True))
    worker.work(rounds=1)  # finds pages
    worker.mover.trial.advance()
    assert worker.staging.taken_count == 4
    worker.clock.advance(0.5)
    worker.work(rounds=1)
    report = worker.jobs.report()
    assert (report.loaded_tokens, report.loading_s) == (4 * PART.chunk_tokens, 0.5)
    assert worker.jobs.report() is None
    assert worker.jobs.is_idle()


def test_a_worker_tries_a_store_with_pages_when_it_starts(worker):
    part = worker.parts[0]
    trial = Trial(worker.pages, worker.staging, worker.runner, worker.clock, [part, part])
    trial.advance()
    worker.runner.step()
    trial.advance()
    worker.clock.advance(0.25)
    assert trial.read(worker.pages.poll()) == []
    assert trial.take() == (4 * PART.chunk_tokens, 0.5)  # for the bytes of two parts
    assert worker.staging.taken_count == 0


def test_what_cannot_be_read_says_nothing(worker):
    worker.jobs.before_step(Plan(NAMES, tries_store=True))
    worker.work(rounds=1)
    for page in worker.medium.segments[1].slots.values():
        page[5000] ^= 1
    worker.work()
    assert worker.jobs.report() is None
    assert worker.jobs.is_idle()


def test_what_cannot_be_read_in_part_says_nothing_either(worker):
    """One page of four was evicted meanwhile: the store seemed to take four times as long."""
    worker.jobs.before_step(Plan(NAMES, tries_store=True))
    worker.work(rounds=1)
    next(iter(worker.medium.segments[1].slots.values()))[5000] ^= 1
    worker.clock.advance(0.5)
    worker.work()
    assert worker.jobs.report() is None
    assert worker.jobs.is_idle()


def test_a_trial_does_not_take_the_time_of_a_load_that_goes_on(worker):
    worker.load(tuple(range(11, 19)))
    worker.clock.advance(2.0)
    trial = worker.mover.trial
    trial.ask()
    trial.advance()
    worker.runner.step()
    trial.advance()
    worker.clock.advance(0.5)
    trial.read(worker.pages.poll())
    assert worker.jobs.report().loading_s == 0.5
    worker.work()
    worker.jobs.collect()
    assert worker.jobs.report().loading_s >= 2.5


def test_pages_are_not_looked_for_for_ever(worker, monkeypatch):
    """A store of many segments without pages kept the commits of its rank waiting."""
    scanned = []
    for segment in range(2, 5):
        worker.pages.create_segment(segment, PART.namespace, PART.geometry)

    def slow(segment):
        scanned.append(segment)
        worker.clock.advance(0.4)
        return iter(())

    monkeypatch.setattr(worker.pages, "scan", slow)
    worker.jobs.before_step(Plan(NAMES, tries_store=True))
    worker.work(rounds=1)
    assert len(scanned) == 2
    assert worker.runner.is_available()


def test_trials_do_not_all_begin_at_the_same_pages(worker, monkeypatch):
    """Those are in a cache after the first one, and the store seems faster than it is."""
    first = []
    for segment in range(2, 5):
        worker.pages.create_segment(segment, PART.namespace, PART.geometry)
    monkeypatch.setattr(worker.pages, "scan", lambda segment: iter([first.append(segment)] * 4))
    for _ in range(20):
        worker.mover.trial.ask()
        worker.mover.trial._find()
    assert set(first) == {1, 2, 3, 4}


def test_a_trial_leaves_staging_to_loads_and_stores(worker):
    taken = [worker.staging.take_for_store() for _ in range(12)]
    assert None not in taken
    worker.jobs.before_step(Plan(NAMES, tries_store=True))
    worker.work()
    assert worker.staging.taken_count == 12
    assert worker.jobs.report() is None
