"""One real vLLM engine: times to first token, cold and with hits, and what it answered.

    python engine.py plain MODEL RESULT   without kvferry: cold, then the engine's own prefix hit
    python engine.py store MODEL RESULT   the same with kvferry, over an empty store
    python engine.py load  MODEL RESULT   asks once: everything is loaded from the store
    python engine.py compare PLAIN STORE LOAD

Prompt lengths are 8 more than a multiple of 128 tokens, so that a hit of the engine's own prefix
cache (blocks of 16) and one of the store (chunks of 64 or 128) have the same length: the same KV,
the same shapes, so exactly the same answer. `compare` says where that, or the number of tokens
loaded, is not so, and exits 1.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

STARTED_S = time.perf_counter()


def say(*words: Any) -> None:
    print(f"[{time.perf_counter() - STARTED_S:6.1f}]", *words, flush=True)


class Engine:
    """An engine in this process."""

    def __init__(self, arguments: argparse.Namespace):
        from vllm import LLM  # noqa: PLC0415 - takes many seconds

        settings: dict[str, Any] = {
            "dtype": arguments.dtype,
            "load_format": "dummy" if arguments.dummy else "auto",
            "max_model_len": arguments.model_tokens,
            "enforce_eager": not arguments.graphs,
            "enable_prefix_caching": True,
            "max_num_seqs": 32,
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
            **json.loads(arguments.settings),
        }
        if arguments.graphs:
            settings["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
            }
        if arguments.role != "plain":
            settings["kv_transfer_config"] = transfer(arguments)
        started_s = time.perf_counter()
        self._engine = LLM(arguments.model, **settings)
        self.start_s = time.perf_counter() - started_s
        self.vocabulary = self._engine.llm_engine.model_config.get_vocab_size()
        say(f"engine is up after {self.start_s:.1f} s")

    def ask(self, prompt: list[int], answer_tokens: int = 1) -> dict[str, Any]:
        from vllm import SamplingParams  # noqa: PLC0415 - as well

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=answer_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=1 if answer_tokens > 1 else None,
        )
        started_s = time.perf_counter()
        output = self._engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
        duration_s = time.perf_counter() - started_s
        chosen = output.outputs[0]
        steps = zip(chosen.token_ids, chosen.logprobs or (), strict=False)
        return {
            "ms": duration_s * 1e3,
            "cached_tokens": output.num_cached_tokens,
            "tokens": list(chosen.token_ids),
            "logprobs": [step[token].logprob for token, step in steps],
        }

    def metrics(self) -> dict[str, float]:
        """kvferry's own counters and gauges, by name and labels."""
        found = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None and "kvferry" in metric.name:
                labels = {
                    k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")
                }
                found[f"{metric.name}{labels or ''}"] = value
        return found

    def rest(self, seconds: float) -> None:
        """Lets stores end; a step now and then lets the scheduler side hear of it."""
        give_up_s = time.perf_counter() + seconds
        while time.perf_counter() < give_up_s:
            time.sleep(0.25)
            self.ask([1, 2, 3])

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


def transfer(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {
        "pages": f"posix://{arguments.store}",
        "capacity_bytes": arguments.capacity,
        "model_id": Path(arguments.model).name,
        **json.loads(arguments.options),
    }
    return {
        "kv_connector": "FerryStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }


def prompt_of(length: int, index: int, vocabulary: int) -> list[int]:
    numbers = random.Random(f"{length} {index}")
    return [numbers.randrange(2, vocabulary) for _ in range(length)]


def run(arguments: argparse.Namespace) -> None:
    engine = Engine(arguments)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    for length in (max(lengths), max(lengths)):
        say("warm-up", round(engine.ask(prompt_of(length, -len(lengths), engine.vocabulary))["ms"]))
    rows = []
    for length in lengths:
        for index in range(arguments.prompts):
            prompt = prompt_of(length, index, engine.vocabulary)
            row: dict[str, Any] = {"length": length, "index": index, "first": engine.ask(prompt)}
            if arguments.role == "load":
                row["first"] |= answer(engine, prompt, length)
            else:
                row["again"] = engine.ask(prompt) | answer(engine, prompt, length)
                engine.rest(0.25 if arguments.role == "plain" else arguments.rest_s)
            rows.append(row)
            say(length, index, {k: round(v["ms"], 1) for k, v in row.items() if k in MOMENTS})
    say(json.dumps(engine.metrics(), indent=1))
    result = {"role": arguments.role, "start_s": engine.start_s, "rows": rows}
    result["metrics"] = engine.metrics()
    Path(arguments.result).write_text(json.dumps(result))
    engine.close()


MOMENTS = ("first", "again")


def answer(engine: Engine, prompt: list[int], length: int) -> dict[str, Any]:
    """A longer answer to a prompt whose KV is there by now: what the KV is worth."""
    longer = engine.ask(prompt, 16)
    return {"tokens": longer["tokens"], "logprobs": longer["logprobs"]}


def compare(paths: list[str]) -> None:
    plain, store, load = (json.loads(Path(path).read_text()) for path in paths)
    wrong = []
    table: dict[int, dict[str, list[float]]] = {}
    for base, stored, loaded in zip(plain["rows"], store["rows"], load["rows"], strict=True):
        name, length = f"{base['length']}/{base['index']}", base["length"]
        expected = length // 128 * 128
        first = loaded["first"]
        if first["cached_tokens"] != expected:
            wrong.append(f"{name}: {first['cached_tokens']} tokens loaded, not {expected}")
        for what, other in (("storing", stored["again"]), ("loading", first)):
            for field in ("tokens", "logprobs"):
                if other[field] != base["again"][field]:
                    wrong.append(f"{name}: {what}: other {field} than the engine's own hit")
        times = table.setdefault(
            length, {"cold": [], "cold, storing": [], "own hit": [], "loaded": []}
        )
        times["cold"].append(base["first"]["ms"])
        times["cold, storing"].append(stored["first"]["ms"])
        times["own hit"].append(base["again"]["ms"])
        times["loaded"].append(first["ms"])
    rows = {
        str(length): {what: round(median(found), 1) for what, found in times.items()}
        for length, times in table.items()
    }
    starts = {part["role"]: round(part["start_s"], 1) for part in (plain, store, load)}
    print(json.dumps({"time_to_first_token_ms": rows, "start_s": starts, "wrong": wrong}, indent=1))
    sys.exit(1 if wrong else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("plain", "store", "load"))
    parser.add_argument("model")
    parser.add_argument("result")
    parser.add_argument("--store", default="/dev/shm/kv")
    parser.add_argument("--capacity", default="24GiB")
    parser.add_argument("--lengths", default="1032,5000,19976")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model-tokens", type=int, default=32768)
    parser.add_argument("--rest-s", type=float, default=3.0)
    parser.add_argument("--settings", default="{}", help="more of LLM's arguments, as JSON")
    parser.add_argument("--options", default="{}", help="more of kvferry's settings, as JSON")
    run(parser.parse_args())


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:
        compare(sys.argv[2:])
    else:
        main()
