"""One engine of a demo, in a process of its own: see `engine_process`.

It answers as `engine_program` does; the operations are the methods of `DemoEngine`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cli.engine_program import serve
from kvferry.clock import Clock, SystemClock

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"


class DemoEngine:
    """One engine, asked from one thread."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._engine: Any = None

    def open(self, model: str, kv_transfer_config: Mapping[str, Any] | None) -> None:
        """Starts it and warms it up on tokens that nobody asks for."""
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes many seconds

        options = {"kv_transfer_config": kv_transfer_config} if kv_transfer_config else {}
        self._engine = LLM(
            model=model,
            dtype="float32",
            block_size=32,
            max_model_len=4096,
            enforce_eager=True,
            disable_log_stats=False,
            **options,
        )
        self._engine.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)

    def ask(
        self,
        prompt: str | Sequence[int],
        answer_tokens_max: int,
        transfer: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """The greedy answer, the seconds to its first token, the tokens that vLLM says it loaded
        from outside for it. `transfer`: kv_transfer_params, here and in the reply."""
        from vllm import SamplingParams  # noqa: PLC0415

        extra = {"kv_transfer_params": dict(transfer)} if transfer else None
        sampling = SamplingParams(temperature=0.0, max_tokens=answer_tokens_max, extra_args=extra)
        loaded_tokens = self._counter(EXTERNAL_HITS)
        core = self._engine.llm_engine
        started_s = self._clock.now_s()
        core.add_request(
            "question",
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
            sampling,
        )
        first_token_s, output = None, None
        while core.has_unfinished_requests():
            for output in core.step():
                if first_token_s is None and output.outputs[0].token_ids:
                    first_token_s = self._clock.now_s() - started_s
        chosen = output.outputs[0]
        return {
            "prompt_ids": list(output.prompt_token_ids),
            "loaded_tokens": self._counter(EXTERNAL_HITS) - loaded_tokens,
            "first_token_s": first_token_s,
            "token_ids": list(chosen.token_ids),
            "text": chosen.text.strip(),
            "transfer": output.kv_transfer_params,
        }

    def sum_of(self, histogram: str) -> float:
        """Of all observations so far; 0 if it is not there."""
        metrics = self._engine.get_metrics()
        return sum(metric.sum for metric in metrics if metric.name == histogram)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.llm_engine.engine_core.shutdown()

    def _counter(self, name: str) -> int:
        metrics = self._engine.get_metrics()
        return int(sum(metric.value for metric in metrics if metric.name == name))


if __name__ == "__main__":
    serve(lambda: {"": DemoEngine(SystemClock())})
