"""One engine of the demo, in a process of its own: a question on standard input, an answer out.

    python -m kvferry.cli.demo_engine < {"model": ..., "prompt": ..., "kv_transfer_config": ...}

The reply is one line of JSON: prompt token ids, tokens that vLLM says it loaded from outside, time
to first token in seconds, token ids and text of the answer.
"""

import json
import os
import sys
from typing import Any

from kvferry.clock import SystemClock

ANSWER_TOKENS_MAX = 32
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Starts an engine, warms it up on other tokens, asks once, shuts it down."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes many seconds

    options = {"kv_transfer_config": job["kv_transfer_config"]} if job["kv_transfer_config"] else {}
    engine = LLM(
        model=job["model"],
        dtype="float32",
        block_size=32,
        max_model_len=4096,
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS_MAX)
    engine.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    reply = _ask(engine, job["prompt"], sampling)
    reply["loaded_tokens"] = _counter(engine, EXTERNAL_HITS)
    if job["wait_s"]:
        SystemClock().sleep(job["wait_s"])
    engine.llm_engine.engine_core.shutdown()
    return reply


def _ask(engine: Any, prompt: str, sampling: Any) -> dict[str, Any]:
    clock = SystemClock()
    core = engine.llm_engine
    started_s = clock.now_s()
    core.add_request("question", prompt, sampling)
    first_token_s, output = None, None
    while core.has_unfinished_requests():
        for output in core.step():
            if first_token_s is None and output.outputs[0].token_ids:
                first_token_s = clock.now_s() - started_s
    chosen = output.outputs[0]
    return {
        "prompt_ids": list(output.prompt_token_ids),
        "first_token_s": first_token_s,
        "token_ids": list(chosen.token_ids),
        "text": chosen.text.strip(),
    }


def _counter(engine: Any, name: str) -> int:
    return int(sum(metric.value for metric in engine.get_metrics() if metric.name == name))


def main() -> None:
    """What vLLM prints on standard output goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    replies.write(json.dumps(answer(json.load(sys.stdin))) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
