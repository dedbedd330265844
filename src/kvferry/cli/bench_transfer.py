"""Time to first token of a prompt that another engine has computed, beside vLLM's NixlConnector.

A pair of engines for each connector, one pair after the other and the whole again `rounds` times:
on a small machine one pair would disturb the other, since NIXL's own thread takes a core for each
agent of NixlConnector. Both get the same prompts, which nobody has cached. After each the consumer
is asked the same once more, which is its own prefix hit, and another prompt of the same length,
which it computes.

A consumer meets two producers, the second one when the first is gone: what the first request to
each of them takes longer than the others is the penalty.
"""

import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import shake_256
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.cli import demo_asking, output, pd_demo
from kvferry.cli.demo_asking import Engine, Told
from kvferry.clock import Clock
from kvferry.config import SECRET_VARIABLE

VOCABULARY = 49_000
"""Of SmolLM2, less what is special."""
ANSWER_TOKENS = 8
WARM_UP_TOKENS = 64
OWN = "kvferry"
PEER = "nixl"
CONNECTORS: Mapping[str, Mapping[str, Any]] = {
    OWN: {
        "kv_connector": "FerryTransferConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": pd_demo.UNHURRIED,
    },
    PEER: {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
}
PARTS = ("wait", "load", "read")
"""From a request's arrival until its producer has granted it, from its admission until its KV is
here, and one read, of which a load may have several."""


@dataclass
class Times:
    """Of one connector, in milliseconds. `first_ms`: of the first request to each producer, by
    which one it was; `parts_ms`: kvferry's own, `PARTS`."""

    prefill_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    handed_over_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    own_hit_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    computed_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    parts_ms: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    first_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    handshake_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Bench:
    """`wrong` says what does not hold."""

    def __init__(
        self, folder: Path, model: Path, clock: Clock, lengths: Sequence[int], prompt_count: int
    ):
        self._folder = folder
        self._model = model
        self._clock = clock
        self._lengths = lengths
        self._prompt_count = prompt_count
        self._environment = {
            **pd_demo.ONE_MACHINE,
            **pd_demo.AS_A_SERVER,
            SECRET_VARIABLE: clock.random_bytes(32).hex(),
        }
        self._times = {name: Times() for name in CONNECTORS}
        self._answers: dict[Any, list[int]] = {}
        self.wrong: list[str] = []

    def run(self, round_count: int) -> dict[str, Any]:
        for number in range(round_count):
            for name in CONNECTORS:
                self._measure(name, number)
        return self._summary()

    def _measure(self, name: str, number: int) -> None:
        with self._engine(name, "consumer") as consumer:
            with self._engine(name, "producer") as producer:
                consumer.wait()
                self._first(name, "first producer", number, producer, consumer)
                for token_count in self._lengths:
                    for index in range(self._prompt_count):
                        prompt = prompt_of(token_count, f"{number} {index}")
                        self._compare(name, prompt, producer, consumer)
            with self._engine(name, "producer") as producer:
                self._first(name, "second producer", number, producer, consumer)

    def _compare(self, name: str, prompt: list[int], producer: Engine, consumer: Engine) -> None:
        """Handed over, from the consumer's own cache, and computed."""
        times, token_count = self._times[name], len(prompt)
        before = [_seconds(consumer, part) for part in PARTS]
        prefilled, answered = self._hand_over(name, prompt, producer, consumer)
        after = [_seconds(consumer, part) for part in PARTS]
        hit = consumer.ask(prompt, 1)
        computed = consumer.ask(prompt[::-1], 1)
        times.parts_ms[token_count].append(
            [(now_s - then_s) * 1e3 for then_s, now_s in zip(before, after, strict=True)]
        )
        times.prefill_ms[token_count].append(prefilled.first_token_s * 1e3)
        times.handed_over_ms[token_count].append(answered.first_token_s * 1e3)
        times.own_hit_ms[token_count].append(hit.first_token_s * 1e3)
        times.computed_ms[token_count].append(computed.first_token_s * 1e3)

    def _first(
        self, name: str, which: str, number: int, producer: Engine, consumer: Engine
    ) -> None:
        """The consumer has computed the same number of tokens before: only the peer is new."""
        consumer.ask(prompt_of(self._lengths[0], f"warm-up {which} {number}"), 2)
        before = _seconds(consumer, "handshake")
        prompt = prompt_of(self._lengths[0], f"{which} {number}")
        _, answered = self._hand_over(name, prompt, producer, consumer)
        times = self._times[name]
        times.first_ms[which].append(answered.first_token_s * 1e3)
        if name == OWN:
            times.handshake_ms[which].append((_seconds(consumer, "handshake") - before) * 1e3)

    def _hand_over(
        self, name: str, prompt: list[int], producer: Engine, consumer: Engine
    ) -> tuple[Told, Told]:
        prefilled = producer.ask(prompt, 1, {"do_remote_decode": True})
        answered = consumer.ask(prompt, ANSWER_TOKENS, prefilled.transfer)
        output.complain(f"{name}, {len(prompt)} tokens: {answered.first_token_s * 1e3:.0f} ms")
        if answered.loaded_tokens < len(prompt) - 1:
            self.wrong.append(f"{name}: {answered.loaded_tokens} of {len(prompt)} tokens came over")
        right = self._answers.setdefault(tuple(prompt), answered.token_ids)
        if answered.token_ids != right:
            self.wrong.append(f"{name}: another answer to a prompt of {len(prompt)} tokens")
        return prefilled, answered

    @contextmanager
    def _engine(self, name: str, role: str) -> Iterator[Engine]:
        config = {**CONNECTORS[name], "kv_role": f"kv_{role}"}
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())} if name == PEER else {}
        log = self._folder / f"{name}-{role}.log"
        environment = {**self._environment, **port}
        with demo_asking.running(role, self._model, config, log, environment) as engine:
            yield engine

    def _summary(self) -> dict[str, Any]:
        own, peer = self._times[OWN], self._times[PEER]
        return {
            "lengths": [
                {
                    "prompt_tokens": token_count,
                    "handed_over_ms": self._medians("handed_over_ms", token_count),
                    "own_hit_ms": self._medians("own_hit_ms", token_count),
                    "computed_ms": self._medians("computed_ms", token_count),
                    "prefill_ms": self._medians("prefill_ms", token_count),
                    "each_ms": {
                        name: _rounded(times.handed_over_ms[token_count])
                        for name, times in self._times.items()
                    },
                    "parts_ms": {
                        part: round(median(found), 1)
                        for part, found in zip(
                            PARTS, zip(*own.parts_ms[token_count], strict=True), strict=True
                        )
                    },
                    "ratio": round(
                        median(own.handed_over_ms[token_count])
                        / median(peer.handed_over_ms[token_count]),
                        3,
                    ),
                }
                for token_count in self._lengths
            ],
            "first_request_ms": {
                name: {which: _rounded(found) for which, found in times.first_ms.items()}
                for name, times in self._times.items()
            },
            "handshake_ms": {which: _rounded(ms) for which, ms in own.handshake_ms.items()},
            "wrong": self.wrong,
        }

    def _medians(self, what: str, token_count: int) -> dict[str, float]:
        return {
            name: round(median(getattr(times, what)[token_count]), 1)
            for name, times in self._times.items()
        }


def prompt_of(token_count: int, name: str) -> list[int]:
    """Token ids that follow from `name` and the length."""
    content = shake_256(f"{token_count} {name}".encode()).digest(4 * token_count)
    return [17 + number % VOCABULARY for number in memoryview(content).cast("I")]


def _seconds(consumer: Engine, part: str) -> float:
    """What kvferry has spent on it so far; 0 if it is not there."""
    return consumer.sum_of(f"vllm:kvferry_transfer_{part}_seconds")


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
