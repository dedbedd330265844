"""One real engine, for measurements: what a process of `engine_program` holds."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from kvferry.cli import seeded_weights
from kvferry.cli.paced_pages import PacedPages
from kvferry.clock import Clock
from kvferry.offload import build

CPU_SETTINGS = {"dtype": "float32", "block_size": 32}
GPU_SETTINGS = {"dtype": "bfloat16"}
MODES: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        }
    },
    "compiled": {},
}
"""See `engine_runs.MODES`."""
LINK_BYTES = 256 << 20
LINK_ROUNDS = 15
IDLE_S = 0.05


class MeasuredEngine:
    """At most one engine, asked from one thread."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._count = 0
        self.llm: LLM | None = None
        self.pages: list[PacedPages] = []

    def open(
        self,
        model: str,
        mode: str,
        load_format: str,
        settings: Mapping[str, Any],
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
    ) -> dict[str, Any]:
        """Opens it, with further arguments of `LLM`, and says what it is. The two rates: of a
        disk to pretend."""
        seeded_weights.register()
        self._watch_pages(read_bytes_per_s, write_bytes_per_s)
        platform = CPU_SETTINGS if current_platform.is_cpu() else GPU_SETTINGS
        started_s = self._clock.now_s()
        self.llm = LLM(
            model=model,
            load_format=load_format,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **{**platform, **MODES[mode], **settings},
        )
        config = self.llm.llm_engine.vllm_config
        return {
            "start_s": round(self._clock.now_s() - started_s, 1),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "block_tokens": config.cache_config.block_size,
            "element_bytes": config.model_config.dtype.itemsize,
        }

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        answer_tokens: int = 1,
        is_reset: bool = False,
        transfers: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[dict[str, Any]]:
        """One prompt after the other: the milliseconds to the end of each answer (of one token:
        the time to first token), and the answer. `is_reset`: what the engine itself has cached
        is forgotten before each. Answers of several tokens have log-probabilities. `transfers`:
        what each request carries for a transfer connector."""
        carried = transfers or [None] * len(prompts)
        return [
            self._ask(prompt, sampling(answer_tokens, answer_tokens > 1, transfer), is_reset)
            for prompt, transfer in zip(prompts, carried, strict=True)
        ]

    def batch(self, prompts: Sequence[Sequence[int]]) -> float:
        """All prompts at once: seconds to the last first token."""
        started_s = self._clock.now_s()
        for prompt in prompts:
            self.add(prompt, sampling(1))
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        return self._clock.now_s() - started_s

    def reset(self) -> bool:
        """The engine forgets its own cache, and connectors keep theirs."""
        return self.llm.reset_prefix_cache()

    def rest(self, duration_s: float) -> None:
        """A step now and then: some connectors need them to get on."""
        give_up_s = self._clock.now_s() + duration_s
        while self._clock.now_s() < give_up_s:
            self._clock.sleep(IDLE_S)
            self._ask([1, 2, 3], sampling(1), False)

    def metrics(self) -> dict[str, float]:
        """kvferry's counters and gauges; those with a label as "name:label"."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if name.startswith("kvferry_") and (value := getattr(metric, "value", None)):
                own = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
                found[":".join([name, *own.values()])] = value
        return found

    def traffic(self) -> dict[str, int]:
        """Bytes that kvferry has read and verified, and that it has written."""
        return {
            "read_bytes": sum(pages.reads.good_bytes for pages in self.pages),
            "written_bytes": sum(pages.writes.good_bytes for pages in self.pages),
        }

    def link(self) -> float:
        """Bytes per second of plain copies from pinned memory to the device."""
        is_gpu = torch.cuda.is_available()
        source = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
        target = torch.empty_like(source, device="cuda" if is_gpu else "cpu")
        times_s = []
        for _ in range(LINK_ROUNDS):
            started_s = self._clock.now_s()
            target.copy_(source, non_blocking=True)
            if is_gpu:
                torch.cuda.synchronize()
            times_s.append(self._clock.now_s() - started_s)
        return LINK_BYTES / median(times_s)

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()

    def add(self, prompt: Sequence[int], parameters: SamplingParams) -> str:
        """Sends a request; returns its id."""
        self._count += 1
        request = {"prompt_token_ids": list(prompt)}
        self.llm.llm_engine.add_request(str(self._count), request, parameters)
        return str(self._count)

    def _ask(
        self, prompt: Sequence[int], parameters: SamplingParams, is_reset: bool
    ) -> dict[str, Any]:
        if is_reset:
            self.llm.reset_prefix_cache()
        started_s = self._clock.now_s()
        self.add(prompt, parameters)
        output = None
        while self.llm.llm_engine.has_unfinished_requests():
            output = next(iter(self.llm.llm_engine.step()), output)
        duration_s = self._clock.now_s() - started_s
        answer = output.outputs[0]
        steps = zip(answer.token_ids, answer.logprobs or (), strict=False)
        return {
            "ms": duration_s * 1e3,
            "cached_tokens": output.num_cached_tokens,
            "tokens": list(answer.token_ids),
            "logprobs": [step[token].logprob for token, step in steps],
            "transfer": output.kv_transfer_params,
        }

    def _watch_pages(self, *bytes_per_s: float | None) -> None:
        open_pages = build.open_pages

        def open_watched_pages(*arguments: Any, **named: Any) -> PacedPages:
            pages = PacedPages(open_pages(*arguments, **named), self._clock, *bytes_per_s)
            self.pages.append(pages)
            return pages

        build.open_pages = open_watched_pages


def sampling(
    answer_tokens: int,
    with_logprobs: bool = False,
    transfer: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Greedy, to the last token. `transfer`: for a transfer connector."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=answer_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=1 if with_logprobs else None,
        extra_args={"kv_transfer_params": dict(transfer)} if transfer else None,
    )
