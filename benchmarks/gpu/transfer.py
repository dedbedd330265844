"""Prefill in one engine, answer in another, both on one GPU: time to first token of what was handed
over, beside vLLM's NixlConnector.

    transfer.py FOLDER [--shape 8b] [--lengths 5008,20000] [--prompts 3] [--weights dummy]
        [--connectors kvferry,nixl] [--consumer-block 32]

One engine alone first, for right answers and its own hits; then a pair for each connector. Prints
JSON; exit code 1 if a token was not handed over, or an answer differs from the engine's own hit of
the same length. After its prompts each producer is killed while a prompt is being handed over. A
pair that fails or does not answer is said to, and the next one is measured.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.cli import shapes
from kvferry.cli.engine_process import EngineProcess
from kvferry.clock import SystemClock
from kvferry.config import SECRET_VARIABLE
from kvferry.errors import UnavailableError

ANSWER_TOKENS = 9
WARM_UPS = 2
REST_S = 0.1
ANSWER_S = 90.0
"""For the longest call, the start of an engine."""
CLOCK = SystemClock()
SETTINGS = {"max_num_batched_tokens": 32768, "gpu_memory_utilization": 0.35, "max_num_seqs": 32}
OURS, SURVIVED = "kvferry", "same answer"
WANTED = {
    OURS: {"do_remote_decode": True},
    "nixl": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
}
"""What a router adds to a request for a prefill."""


def connector(name: str, role: str, shape: str) -> dict[str, Any]:
    if name == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = {"model_id": shape, "tokens_min": 1, "claim_deadline_s": 30.0}
    return {
        "kv_connector": "FerryTransferConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Bench:
    """`wrong` says what does not hold."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._folder = Path(arguments.folder)
        self._shape = shapes.shape_of(arguments.shape)
        self._lengths = [int(length) for length in arguments.lengths.split(",")]
        self._secret = CLOCK.random_bytes(32).hex()
        self._right: dict[Any, dict[str, Any]] = {}
        self.wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        shapes.save(self._shape, self._folder / "model")
        result: dict[str, Any] = {"alone": self._alone()}
        for name in self._arguments.connectors.split(","):
            with ExitStack() as engines:
                try:
                    result[name] = self._pair(name, engines)
                    if name == OURS and result[name]["producer_killed"] != SURVIVED:
                        self.wrong.append(f"{name}: killed: {result[name]['producer_killed']}")
                except UnavailableError as error:
                    self.wrong.append(f"{name}: {error.message}")
        return result | {"wrong": self.wrong}

    def _prompt(self, length: int, name: Any) -> list[int]:
        """One token more than what is handed over, which is whole blocks."""
        return shapes.prompt(self._shape, length + 1, f"{length}-{name}")

    def _prompts(self) -> list[tuple[int, int, list[int]]]:
        numbers = range(self._arguments.prompts)
        return [(n, i, self._prompt(n, i)) for n in self._lengths for i in numbers]

    def _open(
        self, name: str, port: int, transfer: Any, block_tokens: int | None = None
    ) -> EngineProcess:
        environment = {SECRET_VARIABLE: self._secret, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        log = self._folder / f"{name}.log"
        engine = EngineProcess(log, CLOCK, ANSWER_S, environment=environment)
        engine.start()
        length = max(self._lengths) + 64
        blocks = {"block_size": block_tokens} if block_tokens else {}
        engine.call(
            "open",
            model=str(self._folder / "model"),
            mode="eager",
            load_format=self._arguments.weights,
            settings={
                **SETTINGS,
                "max_model_len": length,
                "kv_transfer_config": transfer,
                **blocks,
            },
        )
        return engine

    def _alone(self) -> dict[str, Any]:
        engine = self._open("alone", 5600, None)
        for length in self._lengths:
            engine.call("ask", prompts=WARM_UPS * [self._prompt(length, "warm-up")])
        cold_ms, hit_ms = Times(), Times()
        for length, number, prompt in self._prompts():
            cold, hit = engine.call("ask", prompts=2 * [prompt])
            cold_ms.add(length, cold["ms"])
            hit_ms.add(length, hit["ms"])
            (right,) = engine.call("ask", prompts=[prompt], answer_tokens=ANSWER_TOKENS)
            self._right[length, number] = right
        engine.close()
        return {"computed_ms": cold_ms.medians(), "own_hit_ms": hit_ms.medians()}

    def _pair(self, name: str, engines: ExitStack) -> dict[str, Any]:
        shape = self._arguments.shape
        producer = self._open(f"{name}-producer", 5600, connector(name, "kv_producer", shape))
        engines.callback(producer.kill)
        consuming = connector(name, "kv_consumer", shape)
        block_tokens = self._arguments.consumer_block
        consumer = self._open(f"{name}-consumer", 5700, consuming, block_tokens)
        engines.callback(consumer.kill)
        first_ms, times_ms = [], Times()
        for length in self._lengths:
            for number in range(WARM_UPS):
                prompt = self._prompt(length, f"warm-up {number}")
                first_ms.append(self._hand_over(name, producer, consumer, prompt)["ms"])
        for length, number, prompt in self._prompts():
            answer = self._hand_over(name, producer, consumer, prompt)
            times_ms.add(length, answer["ms"])
            if answer["cached_tokens"] < length:
                self.wrong.append(f"{name}: {answer['cached_tokens']} of {length} tokens came")
            (longer,) = consumer.call("ask", prompts=[prompt], answer_tokens=ANSWER_TOKENS)
            right = self._right[length, number]
            if any(longer[what] != right[what] for what in ("tokens", "logprobs")):
                self.wrong.append(f"{name}: another answer than the engine's own hit")
        return {
            "first_requests_ms": [round(ms, 1) for ms in first_ms],
            **times_ms.as_dict(),
            "producer_killed": self._kill(name, producer, consumer),
        }

    def _hand_over(self, name: str, producer: Any, consumer: Any, prompt: list[int]) -> Any:
        (prefilled,) = producer.call("ask", prompts=[prompt], transfers=[WANTED[name]])
        producer.call("rest", duration_s=REST_S)  # nobody else steps an engine in this process
        carried = [prefilled["transfer"]]
        return consumer.call("ask", prompts=[prompt], transfers=carried)[0]

    def _kill(self, name: str, producer: EngineProcess, consumer: EngineProcess) -> str:
        """What the consumer does with a prompt whose producer dies meanwhile."""
        prompt = self._prompt(self._lengths[-1], "kill")
        (prefilled,) = producer.call("ask", prompts=[prompt], transfers=[WANTED[name]])
        producer.call("rest", duration_s=REST_S)
        consumer.send("ask", prompts=[prompt], transfers=[prefilled["transfer"]])
        CLOCK.sleep(0.03)
        producer.kill()
        try:
            (answer,) = consumer.receive("ask")
            (again,) = consumer.call("ask", prompts=[prompt], is_reset=True)
        except UnavailableError as error:
            return error.message
        return SURVIVED if answer["tokens"] == again["tokens"] else "another answer"


class Times:
    """Milliseconds by length of prompt."""

    def __init__(self) -> None:
        self._times_ms: dict[int, list[float]] = {}

    def add(self, length: int, ms: float) -> None:
        self._times_ms.setdefault(length, []).append(ms)

    def medians(self) -> dict[int, float]:
        return {length: round(median(times), 1) for length, times in self._times_ms.items()}

    def as_dict(self) -> dict[str, Any]:
        every = {n: [round(ms, 1) for ms in times] for n, times in self._times_ms.items()}
        return {"handed_over_ms": self.medians(), "each_ms": every}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="empty, on a file system with room for logs")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--lengths", default="5008,20000", help="multiples of the block size")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--connectors", default=",".join(WANTED))
    parser.add_argument("--consumer-block", type=int, help="its block size, if it is another")
    parser.add_argument("--weights", default="dummy", choices=["dummy", "seeded"])
    bench = Bench(parser.parse_args())
    print(json.dumps(bench.run(), indent=1))
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sys.exit(main())
