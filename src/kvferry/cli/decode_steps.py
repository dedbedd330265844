"""Steps of an engine that decodes, one by one, while others arrive.

What is timed is from the end of one step to the end of the next: the time between two tokens of a
request that decodes. Only steps in which nothing but decoding was scheduled compare: a step that
also computes a prompt takes longer in any engine.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.cli import blocking_calls
from kvferry.cli.measured_engine import MeasuredEngine, sampling
from kvferry.clock import Clock


class DecodeSteps:
    """`start`, then `run` as often as wanted, then `end`. One thread."""

    def __init__(self, engine: MeasuredEngine, clock: Clock):
        self._engine = engine
        self._clock = clock
        self._running: list[str] = []
        self._scheduled_tokens: list[int] = []

    @property
    def _core(self) -> Any:
        return self._engine.llm.llm_engine

    def start(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        """Returns when all of them decode."""
        if not self._scheduled_tokens:
            self._count_tokens()
        self._running = [self._engine.add(prompt, sampling(answer_tokens)) for prompt in prompts]
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self._core.step()}

    def run(self, arrivals: Sequence[Sequence[int]], step_count: int) -> dict[str, Any]:
        """Steps until the arrivals have their first token and there were `step_count` steps after
        that. `steps`: for each the milliseconds, the tokens that were scheduled in it, arrivals
        that wait, reads and writes under way. `cached_tokens`: of the arrivals."""
        waiting = [self._engine.add(prompt, sampling(1)) for prompt in arrivals]
        cached: dict[str, int] = dict.fromkeys(waiting, -1)
        moved_bytes = self._moved_bytes()
        steps: list[tuple[float, int, int, int, int]] = []
        left, ended_s = step_count, self._clock.now_s()
        begun_s = ended_s
        while left:
            outputs = self._core.step()
            begin_s, ended_s = ended_s, self._clock.now_s()
            for output in outputs:
                if output.request_id in cached:
                    cached[output.request_id] = output.num_cached_tokens
            waiting = [name for name in waiting if cached[name] < 0]
            left -= not waiting
            ms = round((ended_s - begin_s) * 1e3, 3)
            steps.append((ms, self._scheduled_tokens[-1], len(waiting), *self._pending()))
        return {
            "steps": steps,
            "cached_tokens": list(cached.values()),
            "duration_s": ended_s - begun_s,
            "moved_bytes": self._moved_bytes() - moved_bytes,
        }

    def profile(
        self, arrivals: Sequence[Sequence[int]], step_count: int, folder: str
    ) -> dict[str, Any]:
        """As `run`, and which calls of this thread blocked it. `folder`: for the trace."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        trace = Path(folder, "trace.json")
        with torch.profiler.profile(activities=kinds, with_stack=True) as profiler:
            result = self.run(arrivals, step_count)
        profiler.export_chrome_trace(str(trace))
        return result | blocking_calls.count(trace, threading.get_native_id())

    def end(self) -> None:
        self._core.abort_request(self._running)
        while self._core.has_unfinished_requests():
            self._core.step()

    def _count_tokens(self) -> None:
        scheduler = self._core.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            self._scheduled_tokens.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = counted

    def _pending(self) -> tuple[int, int]:
        return (
            sum(pages.reads.pending_count for pages in self._engine.pages),
            sum(pages.writes.pending_count for pages in self._engine.pages),
        )

    def _moved_bytes(self) -> int:
        return sum(self._engine.traffic().values())
