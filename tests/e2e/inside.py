"""The connector of a running engine from the inside: what a test makes fail, and what it looks at.

`Worker` is a vLLM "worker extension", so that it works in whatever process the worker lives; the
scheduler's half is reached only where the engine runs inside the calling process. Faults are
wrappers that are put around the open stores while nothing is under way.
"""

import threading
from random import Random
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.clock import SystemClock
from kvferry.errors import UnavailableError
from kvferry.layout import Address
from kvferry.testing.faults import Fault, FaultyPages
from tests.e2e import inside_transfer

WORKER = "tests.e2e.inside.Worker"
HANG_S = 5.0
"""How long a call that is no batch waits for a page store that hangs, before it gives up."""


class Unseen:
    """Stored bytes that no fault touches."""

    def page(self, address: Address) -> bytes:
        return b""

    def replace_page(self, address: Address, content: bytes) -> None:
        raise AssertionError("this fault needs the bytes at rest")


class StuckCatalog:
    """A catalog whose calls return only when it is released."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._is_free = threading.Event()
        self._is_free.set()

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._inner, verb)
        return found if verb == "close" or not callable(found) else self._guarded(found)

    def hang(self) -> None:
        self._is_free.clear()

    def release(self) -> None:
        self._is_free.set()

    def _guarded(self, call: Any) -> Any:
        def guarded(*arguments: Any) -> Any:
            self._is_free.wait()
            return call(*arguments)

        return guarded


class Worker:
    """Methods of each worker; `how` is a method of the wrapper, or "slow"."""

    def ferry_pages(self, how: str, late_s: float) -> None:
        mover = _mover()
        pages = _disturb(mover._pages, how, late_s)
        for user in (mover, mover._loads, mover._stores, mover.trial):
            user._pages = pages

    def ferry_catalog(self, how: str) -> None:
        _disturb_catalog(_mover()._catalog, how)

    def ferry_state(self) -> dict[str, int]:
        """What is under way in this worker."""
        if inside_transfer.is_there(get_kv_transfer_group()):
            return inside_transfer.worker_state()
        mover = _mover()
        return {
            "loads": mover._loads.pending_count,
            "stores": mover._stores.pending_count,
            "commits": sum(len(jobs) for _, jobs in mover._commits),
            "staging": mover._stores._staging.taken_count,
            "fenced_blocks": len(mover._stores._by_block),
        }


def scheduler_pages(engine: Any, how: str, late_s: float) -> None:
    room = _planner(engine)._supply._room
    room._pages = room._growth._pages = _disturb(room._pages, how, late_s)


def scheduler_catalog(engine: Any, how: str) -> None:
    _disturb_catalog(_planner(engine)._supply._room._catalog, how)


def scheduler_state(engine: Any) -> dict[str, int]:
    """What the scheduler's half holds, and vLLM's own free blocks."""
    scheduler = _core(engine).scheduler
    if inside_transfer.is_there(scheduler.connector):
        return inside_transfer.scheduler_state(scheduler)
    planner = _planner(engine)
    blocks = _core(engine).scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(planner._records),
        "plans": len(planner._loads) + len(planner._late_stores),
        "slots": sum(len(pool) for pool in planner._stores.pools),
        "blocks_in_use": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
    }


class BrokenOpening:
    """From `begin` to `end` no embedded catalog of this process can be opened."""

    def __init__(self) -> None:
        self._open = LmdbCatalog.open
        self._is_free = threading.Event()
        self.attempt_count = 0

    def begin(self, how: str) -> None:
        self._is_free.clear()
        self.attempt_count = 0

        def broken(catalog: LmdbCatalog, *arguments: Any) -> bool:
            self.attempt_count += 1
            if how == "down":
                raise UnavailableError("test.down", "the catalog is down")
            self._is_free.wait()
            return self._open(catalog, *arguments)

        LmdbCatalog.open = broken

    def end(self) -> None:
        LmdbCatalog.open = self._open
        self._is_free.set()


def _core(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def _planner(engine: Any) -> Any:
    return _core(engine).scheduler.connector._scheduler._role._planner


def _mover() -> Any:
    return get_kv_transfer_group()._worker_role._jobs._mover


def _disturb(pages: Any, how: str, late_s: float) -> FaultyPages:
    if not isinstance(pages, FaultyPages):
        pages = FaultyPages(
            pages, Unseen(), SystemClock(), Random(1), {}, late_s_max=late_s, hang_s=HANG_S
        )
        pages.open()
    if how == "slow":
        pages.rates[Fault.LATE] = 1.0
    else:
        getattr(pages, how)()
    return pages


def _disturb_catalog(measured: Any, how: str) -> None:
    if not isinstance(measured._inner, StuckCatalog):
        measured._inner = StuckCatalog(measured._inner)
    getattr(measured._inner, how)()
