"""One vLLM engine at a time, driven by JSON lines from standard input: see `engine.py`."""

import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

BLOCK_TOKENS = 32
COUNTERS = {
    "vllm:external_prefix_cache_hits": "external_hit_tokens",
    "vllm:external_prefix_cache_queries": "external_query_tokens",
    "vllm:prefix_cache_hits": "local_hit_tokens",
    "vllm:num_preemptions": "preemptions",
}


class Program:
    """The other side: holds at most one engine."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._adapters: dict[str, int] = {}

    def open(self, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        started_s = perf_counter()
        defaults = {
            "skip_tokenizer_init": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 200,
            "max_model_len": 2048,
            "dtype": "float32",
            "enforce_eager": True,
            "disable_log_stats": False,
        }
        self._engine = LLM(model=model, **(defaults | dict(settings)))
        return {"duration_s": perf_counter() - started_s}

    def close(self) -> dict[str, Any]:
        self._engine.llm_engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        return {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        salts: Sequence[str | None],
        loras: Sequence[str | None],
    ) -> dict[str, Any]:
        before = self._counters()
        parameters = SamplingParams(
            **({"temperature": 0.0, "logprobs": 1, "detokenize": False} | dict(sampling))
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for item, salt in zip(inputs, salts, strict=False):
            if salt is not None:
                item["cache_salt"] = salt
        adapters = [self._adapter(path) for path in loras] or None
        started_s = perf_counter()
        outputs = self._engine.generate(inputs, parameters, use_tqdm=False, lora_request=adapters)
        duration_s = perf_counter() - started_s
        after = self._counters()
        return {
            "requests": [_answer(output) for output in outputs],
            "duration_s": duration_s,
            **{name: int(after[name] - before[name]) for name in COUNTERS.values()},
        }

    def metrics(self) -> dict[str, Any]:
        totals: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                totals[metric.name] = totals.get(metric.name, 0.0) + value
        return {"metrics": totals}

    def reset(self, reset_connector: bool) -> dict[str, Any]:
        return {"done": self._engine.reset_prefix_cache(reset_connector=reset_connector)}

    def _counters(self) -> dict[str, float]:
        metrics = self.metrics()["metrics"]
        return {short: metrics.get(name, 0.0) for name, short in COUNTERS.items()}

    def _adapter(self, path: str | None) -> Any:
        if path is None:
            return None
        number = self._adapters.setdefault(path, len(self._adapters) + 1)
        return LoRARequest(Path(path).name, number, path)


def _answer(output: Any) -> dict[str, Any]:
    chosen = output.outputs[0]
    steps = zip(chosen.token_ids, chosen.logprobs or (), strict=False)
    return {
        "tokens": list(chosen.token_ids),
        "logprobs": [step[token].logprob for token, step in steps],
        "cached_tokens": output.num_cached_tokens,
    }


def main() -> None:
    """Reads calls until the pipe closes. What vLLM prints goes to the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = Program()
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = getattr(program, call.pop("operation"))(**call)
        except Exception as error:  # whatever it was belongs to the test that asked
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
