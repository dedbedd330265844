"""One vLLM engine at a time, driven by JSON lines from standard input: see `engine.py`."""

import gc
import json
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from kvferry.vllm_plugin import TRANSFER_CONNECTOR
from tests.e2e import injected, inside, installed
from tests.emulation.library import FAULTS, Loaded

BLOCK_TOKENS = 32
IDLE_S = 0.005
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
        self._must_idle = False
        self._adapters: dict[str, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._broken_opening = inside.BrokenOpening()

    def open(self, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        if self._engine is not None:  # the test that opened it has failed
            self.close()
        started_s = perf_counter()
        defaults = {
            "skip_tokenizer_init": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 200,
            "max_model_len": 2048,
            "dtype": "float32",
            "enforce_eager": True,
            "disable_log_stats": False,
            "worker_extension_cls": inside.WORKER,
        }
        self._engine = LLM(model=model, **(defaults | dict(settings)))
        connectors = json.dumps(settings.get("kv_transfer_config"))
        self._must_idle = self._is_inside and TRANSFER_CONNECTOR in connectors
        if not installed.LLM_COUNTS_EVERY_STEP:
            _count_every_step(self._engine.llm_engine)
        return {"duration_s": perf_counter() - started_s}

    def close(self) -> dict[str, Any]:
        self._engine.llm_engine.engine_core.shutdown()
        self._engine, self._must_idle = None, False
        gc.collect()
        return {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        salts: Sequence[str | None],
        loras: Sequence[str | None],
        transfers: Sequence[Any],
    ) -> dict[str, Any]:
        before = self._counters()
        parameters = _parameters(sampling, len(prompts), transfers)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for item, salt in zip(inputs, salts, strict=False):
            if salt is not None:
                item["cache_salt"] = salt
        adapters = [self._adapter(path) for path in loras] or None
        started_s = perf_counter()
        outputs = self._engine.generate(inputs, parameters, use_tqdm=False, lora_request=adapters)
        duration_s = perf_counter() - started_s
        answers, counted = [_answer(output) for output in outputs], self._counted_since(before)
        if not installed.LOCAL_HITS_ARE_COUNTED_ONCE:
            cached_tokens = sum(answer["cached_tokens"] for answer in answers)
            counted["local_hit_tokens"] = cached_tokens - counted["external_hit_tokens"]
        return {"requests": answers, "duration_s": duration_s, **counted}

    def generate_and_abort(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        tokens_until_abort: Sequence[int | None],
        transfers: Sequence[Any],
    ) -> dict[str, Any]:
        """As `generate`, step by step: a request with a limit is aborted after the step in which
        it has so many tokens (0: after the first step, whatever it does)."""
        before, started_s = self._counters(), perf_counter()
        engine, parameters = (
            self._engine.llm_engine,
            _parameters(sampling, len(prompts), transfers),
        )
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, parameters[index])
        limits = {str(i): limit for i, limit in enumerate(tokens_until_abort) if limit is not None}
        answers = [{"tokens": [], "logprobs": [], "cached_tokens": 0} for _ in prompts]
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[int(output.request_id)] = _answer(output)
            for name in [n for n, limit in limits.items() if _has(answers[int(n)], limit)]:
                del limits[name]
                engine.abort_request([name])
        return {
            "requests": answers,
            "duration_s": perf_counter() - started_s,
            **self._counted_since(before),
        }

    def inject(self, fault: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Changes this process by a function of `injected.py`, until `restore`."""
        self._undo.append(getattr(injected, fault)(**arguments))
        return {}

    def restore(self) -> dict[str, Any]:
        while self._undo:
            self._undo.pop()()
        return {}

    def emulate(self, library: str, settings: Mapping[str, float] | None) -> dict[str, Any]:
        """Sets up the emulated 3FS of this process, unless `settings` is None; its counters."""
        loaded = Loaded(Path(library))
        if settings is not None:
            loaded.configure(**settings)
        return {"counts": {name: loaded.count(name) for name in FAULTS}}

    def facts(self) -> dict[str, Any]:
        """What the engine made of its settings."""
        config = self._engine.llm_engine.vllm_config
        return {"async_scheduling": bool(config.scheduler_config.async_scheduling)}

    def metrics(self) -> dict[str, Any]:
        totals: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                reason = metric.labels.get("reason") or metric.labels.get("outcome")
                for name in (metric.name, f"{metric.name}:{reason}")[: 2 if reason else 1]:
                    totals[name] = totals.get(name, 0.0) + value
        return {"metrics": totals}

    def pages(self, how: str, late_s: float) -> dict[str, Any]:
        self._engine.collective_rpc("ferry_pages", args=(how, late_s))
        if self._is_inside:
            inside.scheduler_pages(self._engine, how, late_s)
        return {}

    def catalog(self, how: str) -> dict[str, Any]:
        self._engine.collective_rpc("ferry_catalog", args=(how,))
        inside.scheduler_catalog(self._engine, how)
        return {}

    def catalog_opening(self, how: str) -> dict[str, Any]:
        if how == "works":
            self._broken_opening.end()
        else:
            self._broken_opening.begin(how)
        return {"attempt_count": self._broken_opening.attempt_count}

    def state(self) -> dict[str, Any]:
        ranks = self._engine.collective_rpc("ferry_state")
        state = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        if self._is_inside:
            state |= inside.scheduler_state(self._engine)
        return {"state": state}

    def abort(
        self, prompt: Sequence[int], when: str, step_count_max: int, transfer: Any
    ) -> dict[str, Any]:
        """Aborts a request as soon as the state says that something of the kind is under way."""
        core = self._engine.llm_engine
        (parameters,) = _parameters({"max_tokens": 512}, 1, (transfer,) if transfer else ())
        request_id = core.add_request("aborted", {"prompt_token_ids": list(prompt)}, parameters)
        for _ in range(step_count_max):
            core.step()
            state = self.state()["state"]
            if state[when]:
                break
        core.abort_request([request_id], internal=True)
        return {"state": state}

    def reset(self, reset_connector: bool) -> dict[str, Any]:
        return {"done": self._engine.reset_prefix_cache(reset_connector=reset_connector)}

    def idle(self) -> None:
        """What an engine core of its own does between requests: blocks that are kept for others
        are let go in a step."""
        if self._must_idle:
            engine = self._engine.llm_engine
            if engine.engine_core.engine_core.scheduler.has_requests():
                engine.step()

    @property
    def _is_inside(self) -> bool:
        return hasattr(self._engine.llm_engine.engine_core, "engine_core")

    def _counters(self) -> dict[str, float]:
        metrics = self.metrics()["metrics"]
        return {short: metrics.get(name, 0.0) for name, short in COUNTERS.items()}

    def _counted_since(self, before: Mapping[str, float]) -> dict[str, int]:
        after = self._counters()
        return {name: int(after[name] - before[name]) for name in COUNTERS.values()}

    def _adapter(self, path: str | None) -> Any:
        if path is None:
            return None
        number = self._adapters.setdefault(path, len(self._adapters) + 1)
        return LoRARequest(Path(path).name, number, path)


def _count_every_step(engine: Any) -> None:
    core, get_output = engine.engine_core, engine.engine_core.get_output

    def get_counted_output() -> Any:
        output = get_output()
        if output.scheduler_stats is not None and not output.outputs:
            engine.logger_manager.record(output.scheduler_stats, None)
        return output

    core.get_output = get_counted_output


def _parameters(
    sampling: Mapping[str, Any], count: int, transfers: Sequence[Any]
) -> list[SamplingParams]:
    """Of each prompt."""
    common = {"temperature": 0.0, "logprobs": 1, "detokenize": False} | dict(sampling)
    extras = [{"extra_args": {"kv_transfer_params": transfer}} for transfer in transfers]
    return [SamplingParams(**common, **extra) for extra in extras or [{}] * count]


def _has(answer: Mapping[str, Any], token_count: int) -> bool:
    return len(answer["tokens"]) >= token_count


def _answer(output: Any) -> dict[str, Any]:
    chosen = output.outputs[0]
    steps = zip(chosen.token_ids, chosen.logprobs or (), strict=False)
    return {
        "tokens": list(chosen.token_ids),
        "logprobs": [step[token].logprob for token, step in steps],
        "cached_tokens": output.num_cached_tokens,
        "siblings": [list(other.token_ids) for other in output.outputs[1:]],
        "transfer": output.kv_transfer_params,
    }


def main() -> None:
    """Reads calls until the pipe closes. What vLLM prints goes to the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = Program()
    while True:
        while not select.select([sys.stdin], [], [], IDLE_S)[0]:
            program.idle()
        line = sys.stdin.readline()
        if not line:
            return
        call = json.loads(line)
        try:
            reply = getattr(program, call.pop("operation"))(**call)
        except Exception as error:  # whatever it was belongs to the test that asked
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
