"""Faults for the process of an engine: each function changes it and returns what undoes that.

Called by name from `program.py`, between two engines.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvferry.device.base import Done, Piece
from kvferry.device.host import HostCopier
from kvferry.offload import build
from kvferry.offload.worker.store_jobs import StoreJobs
from kvferry.pages.usrbio import UsrbioPages
from kvferry.transfer.consumer_rank import ConsumerRank
from kvferry.transfer.messages import Answer
from kvferry.transfer.nixl_link import NixlLink

FASTEST_S = 0.02
STOPPING_S = 0.2
"""Until all threads of a process that is told to stop stand still."""


def hold_reads() -> Callable[[], None]:
    """No read from a peer is seen to end, until it is undone."""
    look = NixlLink._look
    NixlLink._look = lambda link, number, ask: ask(link._posts[number].handle) and None

    def undo() -> None:
        NixlLink._look = look

    return undo


def hold_answers() -> Callable[[], None]:
    """Producers' answers to invitations are not heard, until it is undone."""
    take = ConsumerRank.take

    def hold(rank: ConsumerRank, body: Any) -> None:
        if not isinstance(body, Answer):
            take(rank, body)

    ConsumerRank.take = hold

    def undo() -> None:
        ConsumerRank.take = take

    return undo


def stop_at_next_read(group: int) -> Callable[[], None]:
    """A process group gets SIGSTOP just before the next read from a peer is posted."""
    post = NixlLink.post

    def stop_and_post(link: NixlLink, *arguments: Any) -> int:
        NixlLink.post = post
        os.killpg(group, signal.SIGSTOP)
        time.sleep(STOPPING_S)
        return post(link, *arguments)

    NixlLink.post = stop_and_post

    def undo() -> None:
        NixlLink.post = post

    return undo


def break_link() -> Callable[[], None]:
    """The transport is at its end, in a way that nobody expects."""
    poll = NixlLink.poll

    def fail(link: NixlLink) -> None:
        raise RuntimeError("what nobody expected")

    NixlLink.poll = fail

    def undo() -> None:
        NixlLink.poll = poll

    return undo


class SlowCopier(HostCopier):
    """Every gather begins 20 ms to `slowest_s` after it was submitted, as on a busy device.

    Its jobs have negative numbers, which nobody confuses with those of the pool.
    """

    slowest_s = 0.05

    def open(self) -> None:
        super().open()
        self._numbers = itertools.count(-1, -1)
        self._begun = threading.Condition()
        self._pool_jobs: dict[int, int] = {}
        self._late_jobs: dict[int, int] = {}
        self._timers: list[threading.Timer] = []

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        super().close()

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        number = next(self._numbers)
        delay_s = random.Random(number).uniform(FASTEST_S, self.slowest_s)
        timer = threading.Timer(delay_s, self._begin, (number, pieces))
        self._timers.append(timer)
        timer.start()
        return number

    def poll(self) -> list[Done]:
        with self._begun:
            numbers = self._late_jobs
            return [done._replace(job=numbers.pop(done.job, done.job)) for done in super().poll()]

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        give_up_s = time.monotonic() + timeout_s
        late = [job for job in jobs if job < 0]
        with self._begun:
            has_begun = self._begun.wait_for(lambda: self._pool_jobs.keys() >= set(late), timeout_s)
            pool_jobs = [self._pool_jobs.get(job, job) for job in jobs]
        return has_begun and super().finish(pool_jobs, max(0.0, give_up_s - time.monotonic()))

    def _begin(self, number: int, pieces: Sequence[Piece]) -> None:
        with self._begun:
            self._pool_jobs[number] = job = super().submit_gather(pieces)
            self._late_jobs[job] = number
            self._begun.notify_all()


def impatient_rings(io_deadline_s: float, ring_deadline_s: float) -> Callable[[], None]:
    """I/O on 3FS is overdue, and given up, so soon."""
    defaults = UsrbioPages.__init__.__kwdefaults__
    before = dict(defaults)
    defaults.update(io_deadline_s=io_deadline_s, ring_deadline_s=ring_deadline_s)
    return lambda: defaults.update(before)


def slow_gathers(slowest_s: float = 0.05) -> Callable[[], None]:
    """What is gathered is late: long after the step that may overwrite it."""
    SlowCopier.slowest_s = slowest_s
    build.HostCopier = SlowCopier
    return lambda: setattr(build, "HostCopier", HostCopier)


def no_fence() -> Callable[[], None]:
    """No step waits for the gathers of the blocks that it overwrites."""
    fence = StoreJobs.fence
    StoreJobs.fence = lambda self, overwritten: None
    return lambda: setattr(StoreJobs, "fence", fence)
