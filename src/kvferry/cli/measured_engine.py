"""One engine of `kvferry bench engine`, in a process of its own: prompts in, times out.

The first line of standard input says what to open: `model`, `kv_transfer_config` (or null) and
`write_bytes_per_s` (null: as fast as the store is). Each further line is a list of prompts of
token ids; the reply is a list of times to first token, in seconds, one prompt after the other.
"""

import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvferry.clock import Clock, SystemClock
from kvferry.offload import build
from kvferry.pages.base import Extent, PageStore, Result


class SlowPages:
    """A page store whose writes end no sooner than a disk of `bytes_per_s` would end them. Has
    all that `inner` has; threads as for `inner`."""

    def __init__(self, inner: PageStore, clock: Clock, bytes_per_s: float):
        self._inner = inner
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._due_s: dict[tuple[int, int], float] = {}
        self._held: deque[tuple[float, Result]] = deque()
        self._busy_until_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        job = self._inner.submit_writes(extents)
        for index, extent in enumerate(extents):
            length_bytes = extent.slice_count * extent.geometry.slice_bytes
            begun_s = max(self._busy_until_s, self._clock.now_s())
            self._busy_until_s = begun_s + length_bytes / self._bytes_per_s
            self._due_s[job, index] = self._busy_until_s
        return job

    def poll(self) -> list[Result]:
        return self._release(self._inner.poll())

    def wait(self, timeout_s: float) -> list[Result]:
        return self._release(self._inner.wait(timeout_s))

    def _release(self, results: Sequence[Result]) -> list[Result]:
        now_s = self._clock.now_s()
        held = [(self._due_s.pop((r.job, r.index), 0.0), r) for r in results]
        self._held.extend(sorted(held, key=lambda pair: pair[0]))
        ready = [result for due_s, result in self._held if due_s <= now_s]
        self._held = deque(pair for pair in self._held if pair[0] > now_s)
        return ready


class MeasuredEngine:
    """A vLLM engine, asked one prompt at a time."""

    def __init__(self, model: str, transfer: Any, clock: Clock):
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes many seconds

        options = {"kv_transfer_config": transfer} if transfer else {}
        self._clock = clock
        self._count = 0
        self._sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._engine = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=32,
            max_model_len=2048,
            enforce_eager=True,
            **options,
        )

    def ask(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token. What the engine itself has cached does not count."""
        self._engine.reset_prefix_cache()
        core, started_s = self._engine.llm_engine, self._clock.now_s()
        self._count += 1
        core.add_request(str(self._count), {"prompt_token_ids": list(prompt)}, self._sampling)
        while core.has_unfinished_requests():
            core.step()
        return self._clock.now_s() - started_s


def main() -> None:
    """What vLLM prints on standard output goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock, job = SystemClock(), json.loads(sys.stdin.readline())
    if job["write_bytes_per_s"]:
        open_pages = build.open_pages

        def open_slow_pages(*arguments: Any, **named: Any) -> PageStore:
            pages = open_pages(*arguments, **named)
            return SlowPages(pages, clock, job["write_bytes_per_s"])

        build.open_pages = open_slow_pages
    engine = MeasuredEngine(job["model"], job["kv_transfer_config"], clock)
    for line in sys.stdin:
        replies.write(json.dumps([engine.ask(prompt) for prompt in json.loads(line)]) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
