"""What kvferry costs on the scheduler's thread, where every microsecond delays all requests.

Admissions, steps in which every request decodes one token, and the same steps while lookups of
thousands of keys run back to back, without a model. Where vLLM is installed, its own scheduler
drives our connector (`driven_scheduler`). Elsewhere the planner alone is driven, with the embedded
catalog and its runner thread: the translation from vLLM's objects is not in it, and each step
begins with cold caches, since nobody else works on the thread.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from kvferry.clock import Clock, SystemClock
from kvferry.config import child_environment, decode
from kvferry.errors import UnavailableError
from kvferry.metrics import Metrics
from kvferry.offload.base import Identity, Part, Report, Step
from kvferry.offload.build import open_planner
from kvferry.offload.scheduler.planner import Planner
from kvferry.pages.segments import read_superblock

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
PROMPT_TOKENS = 1024
LOOKUP_KEYS = 8192
WARM_UP_STEPS = 20
SETTLE_S = 10.0
FORWARD_S = 0.005
CONTROL_COUNT = 10_000


@dataclass
class BenchRequest:
    """As the planner sees a request."""

    request_id: str
    tokens: list[int]
    is_cacheable: bool = True
    is_readable: bool = True

    def name(self) -> bool:
        return True

    def extras(self, start_token: int, end_token: int) -> bytes:
        return b""


class Driver:
    """The scheduler's part: requests, their block tables, and steps. Times are in seconds."""

    def __init__(self, planner: Planner, clock: Clock):
        self._planner = planner
        self._clock = clock
        self._next_block = 1
        self._tables: dict[str, list[int]] = {}
        self._running: dict[str, BenchRequest] = {}

    def arrive(self, request: BenchRequest) -> float:
        """A request comes in. Returns what `on_new_request` took."""
        return self._timed(lambda: self._planner.on_new_request(request))

    def admit(self, request: BenchRequest) -> float:
        """Steps until the planner has an answer for the request; admits it then. Returns what it
        costs in that step."""
        request_id, answer = request.request_id, None
        deadline_s = self._clock.now_s() + SETTLE_S
        while answer is None and self._clock.now_s() < deadline_s:
            self.step({})
            self._clock.sleep(FORWARD_S)
            start_s = self._clock.now_s()
            answer = self._planner.match(request_id, 0, len(request.tokens))
            taken_s = self._clock.now_s() - start_s
        table = self._grow(request_id, len(request.tokens))
        self._running[request_id] = request
        allocated_s = self._timed(lambda: self._planner.allocated(request_id, [table], 0))
        return taken_s + allocated_s

    def step(self, tokens: dict[str, int]) -> float:
        """One step that schedules so many tokens of each request. Returns what `build` took."""
        new_blocks: set[int] = set()
        computed_tokens = []
        for request_id, count in tokens.items():
            request = self._running[request_id]
            known = len(self._tables[request_id])
            table = self._grow(request_id, len(request.tokens))
            new_blocks.update(table[known:])
            computed_tokens.append(len(request.tokens) - count)
        tables = self._tables
        step = Step(
            request_ids=list(tokens),
            computed_tokens=computed_tokens,
            scheduled_tokens=tokens,
            token_count=sum(tokens.values()),
            preempted=frozenset(),
            new_blocks=frozenset(new_blocks),
            tables=lambda request_id: [tables[request_id]],
        )
        return self._timed(lambda: self._planner.build(step))

    def prefill(self) -> float:
        """One step that computes all prompts."""
        return self.step({name: len(request.tokens) for name, request in self._running.items()})

    def decode(self, token: int) -> float:
        """A step in which each running request gets one token. As in an engine, a forward of some
        milliseconds lies before it: in a loop without one the runner would never get the
        interpreter, and the scheduler would pay for that."""
        self._clock.sleep(FORWARD_S)
        for request in self._running.values():
            request.tokens.append(token)
        return self.step(dict.fromkeys(self._running, 1))

    def control(self) -> float:
        """The same work of the interpreter's every time, none of it kvferry's: what the runner
        thread takes from others shows here."""
        return self._timed(_spin)

    def _grow(self, request_id: str, token_count: int) -> list[int]:
        table = self._tables.setdefault(request_id, [])
        while len(table) * BLOCK_TOKENS < token_count:
            table.append(self._next_block)
            self._next_block += 1
        return table

    def _timed(self, work: Callable[[], Any]) -> float:
        start_s = self._clock.now_s()
        work()
        return self._clock.now_s() - start_s


def run(folder: Path, request_count: int = 256, step_count: int = 1000) -> dict[str, Any]:
    """Measures in `folder`, which is empty and stays the caller's. Times in microseconds. Raises
    UnavailableError if the process with vLLM's scheduler ends early."""
    has_vllm = find_spec("vllm") is not None
    return {
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "driven_by": "vLLM's scheduler" if has_vllm else "the benchmark: vLLM is not installed",
        "forward_ms": FORWARD_S * 1e3,
        "requests": request_count,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "steps": step_count,
        **(drive_vllm if has_vllm else drive_planner)(folder, request_count, step_count),
    }


def drive_vllm(folder: Path, request_count: int, step_count: int) -> dict[str, Any]:
    """The connector below vLLM's scheduler, in a process of its own. See `run`."""
    job = {"folder": str(folder), "requests": request_count, "steps": step_count}
    child = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.driven_scheduler"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(
            VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
        ),
    )
    if child.returncode:
        raise UnavailableError("bench.scheduler", f"its process ends:\n{child.stderr[-2000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def drive_planner(folder: Path, request_count: int, step_count: int) -> dict[str, Any]:
    """The planner alone. See `run`."""
    clock = SystemClock()
    planner = open_planner(decode(options(folder)), clock, Metrics(), rank_count=1)
    try:
        planner.receive(Report(identities=(identity(folder / "pages"),)))
        driver = Driver(planner, clock)
        requests = [BenchRequest(f"request {i}", prompt(i)) for i in range(request_count)]
        arrivals = [driver.arrive(request) for request in requests]
        admissions = [driver.admit(request) for request in requests]
        driver.prefill()
        gc.collect()
        for step in range(WARM_UP_STEPS):
            driver.decode(step)
        quiet = [(driver.decode(step), driver.control()) for step in range(step_count)]
        busy = _decode_while_looking_up(driver, planner, step_count)
    finally:
        planner.close()
    return {
        "step_us": summary([step_s for step_s, _ in quiet]),
        "control_us": summary([control_s for _, control_s in quiet]),
        "admission_us": summary(admissions),
        "arrival_us": summary(arrivals),
        "lookup_keys": LOOKUP_KEYS,
        "step_during_lookups_us": summary([step_s for step_s, _ in busy]),
        "control_during_lookups_us": summary([control_s for _, control_s in busy]),
    }


def _decode_while_looking_up(
    driver: Driver, planner: Planner, step_count: int
) -> list[tuple[float, float]]:
    """As soon as one long prompt has its answer, or is late, the next one asks."""
    tokens = list(range(LOOKUP_KEYS * CHUNK_TOKENS))
    spent: list[tuple[float, float]] = []
    asked_count = 0
    while len(spent) < step_count or asked_count < 2:
        request_id = f"long {asked_count}"
        if not spent or planner.match(request_id, 0, len(tokens)) is not None:
            planner.finished(request_id)
            asked_count += 1
            tokens[0] = asked_count
            planner.on_new_request(BenchRequest(f"long {asked_count}", tokens))
        spent.append((driver.decode(len(spent)), driver.control()))
    return spent


def _spin() -> None:
    for _ in range(CONTROL_COUNT):
        pass


def options(folder: Path) -> dict[str, Any]:
    """Of a connector whose store and catalog lie below `folder`."""
    return {
        "pages": f"posix://{folder}/pages",
        "catalog": f"lmdb://{folder}/catalog",
        "capacity_bytes": "1GiB",
        "segment_bytes": "16MiB",
        "reserve_ahead_count": 1024,
    }


def identity(root: Path) -> Identity:
    """Of the only rank of an engine whose store is at `root`."""
    superblock = read_superblock(root)
    part = Part(
        stage=0,
        group_index=0,
        namespace=b"b" * 32,
        group=1,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        slice_count=1,
        payload_bytes=4096,
        description="{}",
    )
    return Identity(0, 1, 0, bytes.fromhex(superblock.store_id), (part,))


def prompt(index: int) -> list[int]:
    """One of its own for each index. Lengths differ, so that chunks fill up at all steps alike."""
    first = 2 * index * PROMPT_TOKENS
    return list(range(first, first + PROMPT_TOKENS + index % CHUNK_TOKENS))


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """In microseconds."""
    cuts = quantiles(seconds, n=100)
    return {
        "median": round(median(seconds) * 1e6, 1),
        "mean": round(fmean(seconds) * 1e6, 1),
        "p99": round(cuts[98] * 1e6, 1),
        "max": round(max(seconds) * 1e6, 1),
    }
