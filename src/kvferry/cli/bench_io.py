"""Measures the I/O pool against fio and NIXL, and block copies against memcpy.

All contenders of a plan work on one file with the same block, depth and direct flag, one after
the other in each round; what is compared are medians over the rounds. The pool does its real work
(checksums, headers, verification); fio and NIXL move bytes. The file is laid out once and never
changes its size.
"""

import ctypes
import hashlib
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvferry import _native
from kvferry.clock import Clock
from kvferry.errors import ConfigError, InternalError
from kvferry.layout import PageGeometry
from kvferry.pages import header
from kvferry.pages.base import PageId
from kvferry.pages.threads import read_threads, write_threads

GIB = 1 << 30
FIO_ENGINES = ("psync", "io_uring", "libaio")
RESULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What every contender does: the whole file once, block by block, `depth` blocks at a time.

    A block is the extent of a page: `slice_count` headers of 4 KiB, each before `payload_bytes`, a
    multiple of 4,096.
    """

    path: Path
    payload_bytes: int
    block_count: int
    depth: int
    is_direct: bool
    round_count: int
    slice_count: int = 1

    @property
    def geometry(self) -> PageGeometry:
        return PageGeometry(self.slice_count, self.payload_bytes, chunk_tokens=1)

    @property
    def block_bytes(self) -> int:
        return self.geometry.page_bytes

    @property
    def file_bytes(self) -> int:
        return self.block_count * self.block_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass over `moved_bytes`."""

    moved_bytes: int
    elapsed_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.elapsed_s / 1e9

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.moved_bytes / GIB)


class Contender(Protocol):
    """Someone who can pass over the plan's file."""

    name: str

    def run(self, plan: Plan, is_read: bool) -> Sample: ...


class Memory:
    """Page-aligned anonymous memory with every page touched; unmapped with its last view."""

    def __init__(self, length_bytes: int):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.view = mmap.mmap(-1, length_bytes, flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


@dataclass(frozen=True, slots=True)
class Pool:
    """kvferry's own threads, as many as an engine here has but at most `depth`; twice `depth`
    blocks are out, so that none waits for its next one."""

    clock: Clock
    verifies: bool = True

    @property
    def name(self) -> str:
        return "kvferry" if self.verifies else "kvferry without verification"

    @staticmethod
    def place_count(plan: Plan) -> int:
        return 2 * plan.depth

    def run(self, plan: Plan, is_read: bool) -> Sample:
        memory = Memory(self.place_count(plan) * plan.block_bytes)
        descriptor = os.open(plan.path, os.O_RDWR | (os.O_DIRECT if plan.is_direct else 0))
        writers = write_threads(is_direct=plan.is_direct)
        pool = _native.IoPool(min(plan.depth, read_threads()), min(plan.depth, writers))
        try:
            return self._pass(plan, is_read, pool, operations_of(plan, descriptor, memory.address))
        finally:
            pool.close(RESULT_TIMEOUT_S)
            os.close(descriptor)

    def _pass(self, plan: Plan, is_read: bool, pool: Any, operation: Callable) -> Sample:
        """Places that are free again go out together, as the mover does it."""
        known = None if self.verifies else [0] * plan.slice_count
        blocks = iter(range(plan.block_count))
        places: dict[tuple[int, int], int] = {}

        def submit(free: Sequence[int]) -> None:
            begun = list(zip(free, blocks, strict=False))
            if not begun:
                return
            operations = [operation(block, place) for place, block in begun]
            if is_read:
                job = pool.submit_reads(operations, self.verifies)
            else:
                job = pool.submit_writes(operations, known and known * len(begun))
            places.update({(job, index): place for index, (place, _) in enumerate(begun)})

        start_s, start_cpu_s = self.clock.now_s(), _cpu_s(resource.RUSAGE_SELF)
        submit(range(self.place_count(plan)))
        while places:
            results = pool.wait(RESULT_TIMEOUT_S)
            for _, _, outcome, errno, _ in results:
                if outcome:
                    raise InternalError("bench", "a block failed", outcome=outcome, errno=errno)
            submit([places.pop((job, index)) for job, index, *_ in results])
        elapsed_s = self.clock.now_s() - start_s
        return Sample(plan.file_bytes, elapsed_s, _cpu_s(resource.RUSAGE_SELF) - start_cpu_s)


def operations_of(plan: Plan, descriptor: int, address: int) -> Callable[[int, int], tuple]:
    """Makes the operation of a block in a place of the memory at `address`."""
    page = PageId(bytes(32), bytes(32), bytes(32), 0, 0, bytes(16))
    geometry, block_bytes = plan.geometry, plan.block_bytes
    template = header.template(page, geometry)
    return lambda block, place: (
        descriptor,
        block * block_bytes,
        address + place * block_bytes,
        0,
        geometry.slice_count,
        geometry.slice_bytes,
        geometry.payload_bytes,
        template,
    )


@dataclass(frozen=True, slots=True)
class Fio:
    """One engine of fio. Synchronous engines get their depth from threads."""

    engine: str

    @property
    def name(self) -> str:
        return f"fio {self.engine}"

    def run(self, plan: Plan, is_read: bool) -> Sample:
        start_cpu_s = _cpu_s(resource.RUSAGE_CHILDREN)
        report = _fio(self._arguments(plan, is_read, plan.block_count))
        cpu_s = _cpu_s(resource.RUSAGE_CHILDREN) - start_cpu_s
        idle_cpu_s = self._startup_cpu_s(plan, is_read)
        side = report["jobs"][0]["read" if is_read else "write"]
        return Sample(side["io_bytes"], side["runtime"] / 1e3, max(cpu_s - idle_cpu_s, 0.0))

    def _startup_cpu_s(self, plan: Plan, is_read: bool) -> float:
        """What fio takes for itself: a run over one block for each thread."""
        start_cpu_s = _cpu_s(resource.RUSAGE_CHILDREN)
        _fio(self._arguments(plan, is_read, plan.depth))
        return _cpu_s(resource.RUSAGE_CHILDREN) - start_cpu_s

    def _arguments(self, plan: Plan, is_read: bool, block_count: int) -> list[str]:
        share_bytes = block_count // plan.depth * plan.block_bytes
        is_synchronous = self.engine == "psync"
        return [
            "--name=pass",
            f"--filename={plan.path}",
            f"--rw={'read' if is_read else 'write'}",
            f"--ioengine={self.engine}",
            f"--bs={plan.block_bytes}",
            f"--direct={int(plan.is_direct)}",
            f"--numjobs={plan.depth if is_synchronous else 1}",
            f"--iodepth={1 if is_synchronous else plan.depth}",
            f"--size={share_bytes if is_synchronous else share_bytes * plan.depth}",
            f"--offset_increment={share_bytes if is_synchronous else 0}",
            "--iomem_align=4096",
            "--thread",
            "--group_reporting",
            "--overwrite=1",
            "--fallocate=none",
            "--scramble_buffers=0",
            "--invalidate=0",
        ]


def _fio(arguments: Sequence[str]) -> dict:
    command = ["fio", "--output-format=json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError("bench", f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    return json.loads(done.stdout)


@dataclass(frozen=True, slots=True)
class Nixl:
    """NIXL's POSIX backend, in a program of its own (benchmarks/nixl_posix.py)."""

    python: str
    program: Path

    name = "NIXL POSIX"

    def run(self, plan: Plan, is_read: bool) -> Sample:
        command = [
            self.python,
            self.program,
            "read" if is_read else "write",
            plan.path,
            str(plan.block_bytes),
            str(plan.block_count),
            str(plan.depth),
            str(int(plan.is_direct)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError("bench", f"NIXL failed: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return Sample(plan.file_bytes, found["elapsed_s"], found["cpu_s"])


def available(
    clock: Clock, nixl_program: Path | None, nixl_python: str = sys.executable
) -> tuple[list[Contender], list[str]]:
    """Who can take part here, kvferry last, and a line for each who cannot."""
    contenders: list[Contender] = []
    skipped = []
    if shutil.which("fio"):
        contenders += [Fio(engine) for engine in FIO_ENGINES]
    else:
        skipped.append("fio is not installed (Debian: apt-get install fio)")
    probe = [nixl_python, "-c", "import nixl_cu12._api"]
    if nixl_program and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        contenders.append(Nixl(nixl_python, nixl_program))
    else:
        skipped.append("NIXL is not installed (pip install nixl-cu12)")
    return [*contenders, Pool(clock, verifies=False), Pool(clock)], skipped


def measure(
    plan: Plan, contenders: Sequence[Contender], on_pass: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Lays the file out, runs all rounds and removes the file. The last contender writes the file
    once more before each round of reads, so that it can verify it. `on_pass` is called after each
    pass that counts: there are round_count * 2 * len(contenders)."""
    samples: dict[tuple[str, bool], list[Sample]] = {}
    try:
        _lay_out(plan)
        for turn in range(plan.round_count):
            for is_read in (False, True):
                if is_read:
                    contenders[-1].run(plan, False)
                for contender in _rotated(contenders, turn):
                    sample = contender.run(plan, is_read)
                    samples.setdefault((contender.name, is_read), []).append(sample)
                    on_pass()
    finally:
        plan.path.unlink(missing_ok=True)
    return _report(plan, samples)


def _rotated(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    """Everyone starts a round once: disks are faster after a rest."""
    place = turn % len(contenders)
    return [*contenders[place:], *contenders[:place]]


def _lay_out(plan: Plan) -> None:
    content = hashlib.shake_128(b"incompressible").digest(1 << 20)
    with plan.path.open("wb") as file:
        for _ in range(-(-plan.file_bytes // len(content))):
            file.write(content)
        file.truncate(plan.file_bytes)
        os.fsync(file.fileno())


def _report(plan: Plan, samples: dict[tuple[str, bool], list[Sample]]) -> dict[str, Any]:
    verbs = {
        "read" if is_read else "write": {
            name: _medians(taken) for (name, verb), taken in samples.items() if verb == is_read
        }
        for is_read in (False, True)
    }
    return {
        "folder": str(plan.path.parent),
        "block_bytes": plan.block_bytes,
        "slices_in_a_block": plan.slice_count,
        "file_bytes": plan.file_bytes,
        "depth": plan.depth,
        "direct": plan.is_direct,
        "rounds": plan.round_count,
        "results": verbs,
        "ratios_to_best_fio": {verb: _ratios(medians) for verb, medians in verbs.items()},
    }


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    return {
        "gb_per_s": round(statistics.median(s.gb_per_s for s in samples), 3),
        "cpu_s_per_gib": round(statistics.median(s.cpu_s_per_gib for s in samples), 4),
    }


def _ratios(medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of everyone to the fio engine with the highest rate: rate, and CPU time for a byte."""
    engines = [found for name, found in medians.items() if name.startswith("fio ")]
    if not engines:
        return {}
    best = max(engines, key=lambda found: found["gb_per_s"])
    return {
        name: {
            field: round(found[field] / best[field], 3) if best[field] else 0.0 for field in found
        }
        for name, found in medians.items()
    }


def _cpu_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
