"""Measures pages on 3FS against a bare loop over the calls of its library, on one file.

Both have as many rings, as much memory and as many bytes out. The loop (benchmarks/usrbio_loop.c)
looks at no byte; kvferry computes checksums, and once more leaves payloads unverified, as it does
where a GPU proves them. CPU time is that of the whole process: with the emulated library, its
daemon's too.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry import _native
from kvferry.cli import bench_io
from kvferry.cli.bench_io import Plan, Sample
from kvferry.clock import Clock
from kvferry.errors import ConfigError
from kvferry.layout import HEADER_BYTES
from kvferry.pages.hf3fs import find_mount
from kvferry.pages.shared_memory import SharedMemory, sweep
from kvferry.pages.usrbio import (
    ENTRY_MAX,
    FILES_OPEN,
    IO_BYTES,
    IO_DEADLINE_S,
    RING_BYTES_MAX,
    RING_DEADLINE_S,
)

LOOP = "bare loop"
CONTENDER_COUNT = 3
BLOCKS_OUT = 4
"""In each ring, so that it has one more while another is proven or submitted; 32 MiB in engines."""


def plan(folder: Path, page_bytes: int, block_count: int, depth: int, rounds: int) -> Plan:
    """Pages of one slice, header included."""
    payload_bytes = page_bytes - HEADER_BYTES
    return Plan(folder / "bench", payload_bytes, block_count, depth, False, rounds)


@dataclass(frozen=True, slots=True)
class Rings(bench_io.Pool):
    """kvferry's rings, `depth` of them."""

    library: str | None = None

    @staticmethod
    def place_count(plan: Plan) -> int:
        return BLOCKS_OUT * plan.depth

    def run(self, plan: Plan, is_read: bool) -> Sample:
        mount = find_mount(plan.path.parent, self.library, FILES_OPEN)
        sweep(mount.point)
        memory = SharedMemory(mount.point, self.place_count(plan) * plan.block_bytes, self.clock)
        memory.open()
        descriptor = os.open(plan.path, os.O_RDWR)
        mount.library.register_file(descriptor)
        pool = _native.UsrbioPool(
            mount.library,
            mount.point,
            plan.depth,
            plan.depth,
            ENTRY_MAX,
            RING_BYTES_MAX,
            max(IO_BYTES, plan.block_bytes),
            IO_DEADLINE_S,
            RING_DEADLINE_S,
        )
        try:
            pool.add_memory(memory.address, memory.length_bytes, memory.id)
            memory.memory[:] = bytes(memory.length_bytes)
            operations = bench_io.operations_of(plan, descriptor, memory.address)
            return self._pass(plan, is_read, pool, operations)
        finally:
            pool.close(bench_io.RESULT_TIMEOUT_S)
            mount.library.deregister_file(descriptor)
            os.close(descriptor)
            memory.close()


@dataclass(frozen=True, slots=True)
class Loop:
    """The program. As many blocks are out in all as kvferry has places."""

    program: Path
    library: str
    mount: str

    name = LOOP

    def run(self, plan: Plan, is_read: bool) -> Sample:
        command = [
            self.program,
            self.library,
            self.mount,
            plan.path,
            "read" if is_read else "write",
            str(plan.block_bytes),
            str(plan.block_count),
            str(plan.depth),
            str(BLOCKS_OUT),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError("bench", f"the loop failed: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout)
        return Sample(plan.file_bytes, found["elapsed_s"], found["cpu_s"])


def measure(
    plan: Plan, clock: Clock, library: str, program: Path, on_pass: Callable[[], None]
) -> dict[str, Any]:
    """As `bench_io.measure`, with the ratios to the loop."""
    mount = find_mount(plan.path.parent, library, FILES_OPEN)
    contenders = [
        Loop(program, library, mount.point),
        Rings(clock, False, library),
        Rings(clock, True, library),
    ]
    result = bench_io.measure(plan, contenders, on_pass)
    del result["ratios_to_best_fio"], result["direct"]
    ratios = {
        verb: {name: _ratio(rates, found[LOOP]) for name, rates in found.items() if name != LOOP}
        for verb, found in result["results"].items()
    }
    return {**result, "ratios_to_bare_loop": ratios}


def _ratio(found: dict[str, float], loop: dict[str, float]) -> dict[str, float]:
    return {field: round(found[field] / loop[field], 3) for field in found if loop[field]}
