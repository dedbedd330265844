"""Processes that share a catalog and a folder of segments, and are killed at any instruction."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kvferry.catalog.base import Catalog
from kvferry.catalog.open import open_url
from kvferry.catalog.snapshot import check_invariants
from kvferry.clock import SystemClock
from tests.catalog import slot_worker
from tests.catalog.slot_worker import CAPACITY_BYTES, GRACE_S, SEGMENT_BYTES, SEGMENTS_MAX, STORE

CLOCK = SystemClock()


def kill(process: subprocess.Popen) -> str:
    """Kills it and returns what it still had to say."""
    process.send_signal(signal.SIGKILL)
    return process.communicate()[0]


class Crowd:
    """Workers over one folder; those that are killed are replaced."""

    def __init__(self, folder: Path, url: str, seed: int, count: int):
        (folder / "segments").mkdir()
        self._folder = folder
        self._url = url
        self._chance = random.Random(seed)
        self._started = 0
        self.said: Counter[str] = Counter()
        self._workers = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen:
        self._started += 1
        program = [sys.executable, slot_worker.__file__, self._folder]
        command = [*program, self._url, str(self._started)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout.readline() == "ready\n"
        return worker

    def kill_one(self) -> None:
        index = self._chance.randrange(len(self._workers))
        assert self._workers[index].poll() is None, "a worker died by itself"
        self.said.update(kill(self._workers[index]).splitlines())
        self._workers[index] = self._start()

    def kill_all(self) -> None:
        assert all(worker.poll() is None for worker in self._workers), "a worker died by itself"
        for worker in self._workers:
            self.said.update(kill(worker).splitlines())


def live_together(folder: Path, url: str, seed: int, kill_count: int, count: int = 3) -> None:
    """`count` workers on the catalog that a URL names, of which one after another is killed."""
    catalog = open_url(url, CLOCK, GRACE_S)
    catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    crowd = Crowd(folder, url, seed, count)
    chance = random.Random(seed)
    for _ in range(kill_count):
        CLOCK.sleep(chance.random() * 0.4)
        crowd.kill_one()
        assert check_invariants(catalog.snapshot()) == []
        assert len(os.listdir(folder / "segments")) <= SEGMENTS_MAX
    crowd.kill_all()
    assert crowd.said == Counter()
    check_rest(catalog)
    catalog.close()


def check_rest(catalog: Catalog, count_min: int = 100) -> None:
    """The workers did something, and those that were killed left nothing behind."""
    stats = catalog.stats()
    assert stats.published_count > count_min, "the workers did nothing"
    assert stats.evicted_count > count_min
    CLOCK.sleep(slot_worker.LEASE_S + GRACE_S)
    catalog.sweep()
    snapshot = catalog.snapshot()
    assert check_invariants(snapshot) == []
    assert snapshot.reserved == snapshot.graced == {}, "the killed left something behind"
