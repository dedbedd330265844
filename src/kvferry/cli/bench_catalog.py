"""Measures a catalog: lookups, stores and touches, alone, crowded, beside a busy thread.

A catalog of `page_count` pages in chains of `CHAIN_COUNT`, as prompts would make them, is filled in
a scratch folder: an embedded one, or on a Valkey server that is started there. Each figure is taken
over many calls of the public verbs.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.catalog.base import Catalog, Commit, Space
from kvferry.catalog.open import open_url
from kvferry.clock import Clock, SystemClock
from kvferry.errors import InternalError
from kvferry.keys import ROOT_PARENT

CHAIN_COUNT = 8192
"""Keys of one chain, and of one lookup."""
BATCH_COUNT = 64
"""Slots in one call of reserve and of commit."""
SLOTS_PER_SEGMENT = 1024
STORE_ID = b"bench catalog..."
SEGMENT_BYTES = 1 << 30
CAPACITY_BYTES = 1 << 50
WORK_S = 0.0005
"""Length of a busy thread's unit of work: about what one scheduler call takes."""


def space(number: int) -> Space:
    """One namespace for each process that stores."""
    return Space(bytes([number]) * 32, SLOTS_PER_SEGMENT, 1 << 20, 1, 64, "bench")


def chain(number: int) -> list[bytes]:
    """Keys of one chain."""
    prefix = number.to_bytes(8, "big")
    return [
        hashlib.sha256(prefix + index.to_bytes(8, "big")).digest() for index in range(CHAIN_COUNT)
    ]


def run(folder: Path, page_count: int, round_count: int) -> dict[str, Any]:
    """All figures of the embedded catalog. `folder`: on the disk to be measured; it is made."""

    def data_bytes() -> int:
        return (folder / "data.mdb").stat().st_size

    return run_on(f"lmdb://{folder}", data_bytes, page_count, round_count)


def run_on_server(folder: Path, page_count: int, round_count: int) -> dict[str, Any]:
    """All figures of a catalog on a Valkey server with an append-only file in `folder`."""
    from kvferry.catalog import valkey_server  # noqa: PLC0415 - needs an extra

    server = valkey_server.start_on_loopback(folder, SystemClock())
    try:
        figures = run_on(server.url.name, server.used_bytes, page_count, round_count)
    finally:
        server.stop()
    return {"server": server.version, **figures}


def run_on(
    url: str, data_bytes: Callable[[], int], page_count: int, round_count: int
) -> dict[str, Any]:
    """All figures of the catalog that a URL names. `data_bytes`: what its records take."""
    clock = SystemClock()
    catalog = open_catalog(url, clock)
    empty_bytes = data_bytes()
    chain_count = max(2, page_count // CHAIN_COUNT)
    filling = Stores(catalog, clock, space(1), first_chain=0)
    filling.store(chain_count * CHAIN_COUNT)
    chains = [chain(number) for number in range(min(chain_count, 8))]
    figures = {
        "pages": chain_count * CHAIN_COUNT,
        "keys_per_lookup": CHAIN_COUNT,
        "data_bytes": data_bytes(),
        "bytes_per_page": round((data_bytes() - empty_bytes) / (chain_count * CHAIN_COUNT)),
        "store": filling.figures(),
        "lookup_ms": lookups(catalog, clock, chains, round_count),
        "touch_ms": touches(catalog, clock, chains, round_count),
        "beside_a_busy_thread": beside_a_busy_thread(catalog, clock, chains, round_count),
        "two_processes": two_processes(url, round_count),
    }
    catalog.close()
    return figures


def open_catalog(url: str, clock: Clock) -> Catalog:
    catalog = open_url(url, clock)
    catalog.open(STORE_ID, CAPACITY_BYTES, SEGMENT_BYTES)
    return catalog


class Stores:
    """Stores chain after chain, in batches, and keeps the time of each call."""

    def __init__(self, catalog: Catalog, clock: Clock, space: Space, first_chain: int):
        self._catalog = catalog
        self._clock = clock
        self._space = space
        self._next_chain = first_chain
        self._reserves_s: list[float] = []
        self._commits_s: list[float] = []
        catalog.attach(space)

    def store(self, count: int) -> None:
        """Stores `count` pages, whole chains."""
        for _ in range(count // CHAIN_COUNT):
            keys = chain(self._next_chain)
            self._next_chain += 1
            for first in range(0, CHAIN_COUNT, BATCH_COUNT):
                self._store_batch(keys, first)

    def _store_batch(self, keys: list[bytes], first: int) -> None:
        if first % SLOTS_PER_SEGMENT == 0:
            self._catalog.grown(self._catalog.grow(self._space.namespace))
        namespace = self._space.namespace
        start_s = self._clock.now_s()
        slots = self._catalog.reserve(namespace, BATCH_COUNT, 600.0)
        reserved_s = self._clock.now_s()
        commits = [
            Commit(keys[i], keys[i - 1] if i else ROOT_PARENT, i, slot, 0, 1)
            for i, slot in enumerate(slots, first)
        ]
        self._catalog.commit(namespace, commits)
        self._reserves_s.append(reserved_s - start_s)
        self._commits_s.append(self._clock.now_s() - reserved_s)

    def figures(self) -> dict[str, Any]:
        total_s = sum(self._reserves_s) + sum(self._commits_s)
        return {
            "pages_per_s": round(len(self._commits_s) * BATCH_COUNT / total_s),
            f"reserve_{BATCH_COUNT}_ms": spread_ms(self._reserves_s),
            f"commit_{BATCH_COUNT}_ms": spread_ms(self._commits_s),
        }


def lookups(
    catalog: Catalog, clock: Clock, chains: list[list[bytes]], round_count: int
) -> dict[str, Any]:
    """Lookups that hit, as bytes and as objects, and lookups of which half miss."""
    namespace = space(1).namespace
    absent = chain(1 << 40)[: CHAIN_COUNT // 2]
    half = [keys[: CHAIN_COUNT // 2] + absent for keys in chains]
    packed = timed(lambda keys: catalog.lookup_packed(namespace, keys), clock, chains, round_count)
    objects = timed(lambda keys: catalog.lookup(namespace, keys), clock, chains, round_count)
    misses = timed(lambda keys: catalog.lookup_packed(namespace, keys), clock, half, round_count)
    return {
        "packed": spread_ms(packed),
        "objects": spread_ms(objects),
        "half_missing": spread_ms(misses),
    }


def touches(
    catalog: Catalog, clock: Clock, chains: list[list[bytes]], round_count: int
) -> dict[str, Any]:
    """Touching chains that were touched in this step already, as most are."""
    namespace = space(1).namespace
    for keys in chains:
        catalog.touch(namespace, keys)
    taken_s = timed(lambda keys: catalog.touch(namespace, keys), clock, chains, round_count)
    return {"again": spread_ms(taken_s)}


def beside_a_busy_thread(
    catalog: Catalog, clock: Clock, chains: list[list[bytes]], round_count: int
) -> dict[str, Any]:
    """Lookups back to back while another thread runs Python code all the time, and how long that
    thread's units of work take with and without them."""
    namespace = space(1).namespace
    alone = Busy(clock, calibrated(clock))
    alone.start()
    clock.sleep(1.0)
    alone.stop()
    beside = Busy(clock, alone.loop_count)
    beside.start()
    taken_s = timed(lambda keys: catalog.lookup_packed(namespace, keys), clock, chains, round_count)
    beside.stop()
    return {
        "lookup_ms": spread_ms(taken_s),
        "work_alone_ms": spread_ms(alone.taken_s),
        "work_beside_lookups_ms": spread_ms(beside.taken_s),
    }


class Busy:
    """A thread that holds the GIL whenever it can, and times its units of work."""

    def __init__(self, clock: Clock, loop_count: int):
        self.loop_count = loop_count
        self.taken_s: list[float] = []
        self._clock = clock
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            start_s = self._clock.now_s()
            spin(self.loop_count)
            self.taken_s.append(self._clock.now_s() - start_s)


def spin(loop_count: int) -> None:
    for _ in range(loop_count):
        pass


def calibrated(clock: Clock) -> int:
    """How many turns of `spin` take `WORK_S`."""
    start_s = clock.now_s()
    spin(1_000_000)
    return max(1, int(1_000_000 * WORK_S / (clock.now_s() - start_s)))


def two_processes(url: str, round_count: int) -> dict[str, Any]:
    """Two processes that look up and then store at the same time; the slower one's figures."""
    command = [sys.executable, "-m", "kvferry.cli.bench_catalog", url, str(round_count)]
    processes = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True)
        for number in (2, 3)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise InternalError("bench.process", "a process of the measurement failed")
    first, second = map(json.loads, said)
    slower = max(first, second, key=lambda figures: figures["lookup_ms"]["median"])
    together = first["store"]["pages_per_s"] + second["store"]["pages_per_s"]
    return {**slower, "pages_per_s_together": together}


def one_of_two(url: str, round_count: int, number: int) -> dict[str, Any]:
    """What each of two processes does: lookups of what is there, then stores of its own."""
    clock = SystemClock()
    catalog = open_catalog(url, clock)
    namespace, chains = space(1).namespace, [chain(0), chain(1)]
    taken_s = timed(lambda keys: catalog.lookup_packed(namespace, keys), clock, chains, round_count)
    stores = Stores(catalog, clock, space(number), first_chain=number << 32)
    stores.store(CHAIN_COUNT)
    catalog.close()
    return {"lookup_ms": spread_ms(taken_s), "store": stores.figures()}


def timed(
    call: Callable[[list[bytes]], Any], clock: Clock, chains: list[list[bytes]], round_count: int
) -> list[float]:
    """Seconds of each of `round_count` calls."""
    taken_s = []
    for index in range(round_count):
        keys = chains[index % len(chains)]
        start_s = clock.now_s()
        call(keys)
        taken_s.append(clock.now_s() - start_s)
    return taken_s


def spread_ms(taken_s: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(taken_s)
    p99_s = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return {
        "median": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(p99_s * 1e3, 3),
    }


if __name__ == "__main__":
    print(json.dumps(one_of_two(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
