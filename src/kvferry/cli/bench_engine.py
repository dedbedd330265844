"""What storing costs a real engine, and what loading saves it.

Three engines over the same model, each in a process of its own and asked in turn, round by round:
one without kvferry, one that stores, and one whose store is ten times slower than the engine
computes. All prompts are of random tokens, so that none is found unless it is asked again. Ratios
are medians over rounds, since a machine is faster in one minute than in the next.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.cli.engine_process import EngineProcess
from kvferry.clock import Clock

VOCABULARY = 30_000
LONG_TOKENS = 512
SHORT_TOKENS = 72  # one chunk, so that there is a lookup
PROMPTS_PER_ROUND = 4  # one after the other: what is stored of one costs the next one
SHORTS_PER_ROUND = 3
SLOWNESS = 10
SETTINGS = {"dtype": "float32", "block_size": 32, "max_model_len": 2048}
SETTLE_S = 1.0
"""After each turn, so that what one engine still writes does not disturb the next one."""


class Bench:
    """Measures in `folder`, which is empty and stays the caller's."""

    def __init__(self, folder: Path, model: Path, clock: Clock):
        self._folder = folder
        self._model = model
        self._clock = clock
        self._turn_count = 0

    def run(self, round_count: int, advance: Callable[[], None]) -> dict[str, Any]:
        with ExitStack() as stack:
            plain, stores = self._engine(stack, "plain"), self._engine(stack, "stores")
            for engine in (plain, stores):
                self._ask(engine, [self._prompt(LONG_TOKENS)])
            page_rate = self._bytes_per_token() * LONG_TOKENS
            slow_rate = page_rate / self._ask(plain, [self._prompt(LONG_TOKENS)])[0] / SLOWNESS
            slow = self._engine(stack, "slow", slow_rate)
            self._ask(slow, [self._prompt(LONG_TOKENS)])
            advance()
            engines = {"without": plain, "stores": stores, "slow_store": slow}
            rounds = self._rounds(engines, round_count, advance)
            short = self._short(engines, SHORTS_PER_ROUND * round_count, advance)
            warm = self._warm(stores, round_count, advance)
        return _summary(rounds, short, warm) | {"slow_write_mb_per_s": round(slow_rate / 1e6, 2)}

    def _rounds(
        self, engines: dict[str, EngineProcess], round_count: int, advance: Callable[[], None]
    ) -> dict[str, list[float]]:
        """Seconds for the prompts of each round, one after the other."""
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(round_count):
            prompts = [self._prompt(LONG_TOKENS) for _ in range(PROMPTS_PER_ROUND)]
            for name in self._order(engines):
                seconds[name].append(sum(self._ask(engines[name], prompts)))
            advance()
        return seconds

    def _short(
        self, engines: dict[str, EngineProcess], count: int, advance: Callable[[], None]
    ) -> dict[str, list[float]]:
        """Times to first token of short prompts that no store has."""
        seconds: dict[str, list[float]] = {"without": [], "stores": []}
        for _ in range(count):
            prompt = self._prompt(SHORT_TOKENS)
            for name in self._order(seconds):
                seconds[name] += self._ask(engines[name], [prompt])
            advance()
        return seconds

    def _warm(
        self, stores: EngineProcess, count: int, advance: Callable[[], None]
    ) -> list[tuple[float, float]]:
        """Cold and warm time to first token of the same prompts."""
        pairs = []
        for _ in range(count):
            prompt = self._prompt(LONG_TOKENS)
            pairs.append((self._ask(stores, [prompt])[0], self._ask(stores, [prompt])[0]))
            advance()
        return pairs

    def _ask(self, engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[float]:
        seconds = _first_token_s(engine, prompts)
        self._clock.sleep(SETTLE_S)
        return seconds

    def _order(self, names: dict[str, Any]) -> list[str]:
        """Nobody is always the first."""
        self._turn_count += 1
        return sorted(names, reverse=bool(self._turn_count % 2))

    def _prompt(self, token_count: int) -> list[int]:
        numbers = memoryview(self._clock.random_bytes(2 * token_count)).cast("H")
        return [number % VOCABULARY for number in numbers]

    def _engine(
        self, stack: ExitStack, name: str, write_bytes_per_s: float | None = None
    ) -> EngineProcess:
        transfer = None if name == "plain" else self._transfer(self._folder / name)
        engine = EngineProcess(self._folder / f"{name}.log", self._clock)
        stack.callback(engine.close)
        engine.start()
        engine.call(
            "open",
            model=str(self._model),
            mode="eager",
            load_format="auto",
            settings={**SETTINGS, "kv_transfer_config": transfer},
            write_bytes_per_s=write_bytes_per_s,
        )
        return engine

    def _transfer(self, folder: Path) -> dict[str, Any]:
        return {
            "kv_connector": "FerryStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "pages": f"posix://{folder}/pages",
                "catalog": f"lmdb://{folder}/catalog",
                "capacity_bytes": "4GiB",
            },
        }

    def _bytes_per_token(self) -> int:
        """Of KV cache, in float32."""
        model = json.loads((self._model / "config.json").read_text())
        head_size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        return model["num_hidden_layers"] * model["num_key_value_heads"] * head_size * 2 * 4


def _first_token_s(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Of each prompt, from its arrival; the engine's own cache does not count."""
    answers = engine.call("ask", prompts=prompts, is_reset=True)
    return [answer["ms"] / 1e3 for answer in answers]


def _summary(
    rounds: dict[str, list[float]],
    short: dict[str, list[float]],
    warm: list[tuple[float, float]],
) -> dict[str, Any]:
    tokens = LONG_TOKENS * PROMPTS_PER_ROUND
    medians = {name: median(seconds) for name, seconds in rounds.items()}
    ratios = {
        name: median(a / b for a, b in zip(seconds, rounds["without"], strict=True))
        for name, seconds in rounds.items()
    }
    pairs = zip(short["stores"], short["without"], strict=True)
    return {
        "prompt_tokens": LONG_TOKENS,
        "rounds": len(rounds["without"]),
        "prefill_tokens_per_s": {name: round(tokens / s, 1) for name, s in medians.items()},
        "round_seconds": {name: [round(s, 3) for s in found] for name, found in rounds.items()},
        "cost_of_storing": round(ratios["stores"] - 1, 4),
        "throughput_with_slow_store": round(1 / ratios["slow_store"], 4),
        "short_prompt_tokens": SHORT_TOKENS,
        "short_first_token_ms": {
            name: round(median(seconds) * 1e3, 2) for name, seconds in short.items()
        },
        "first_token_rise_ms": round(median(a - b for a, b in pairs) * 1e3, 2),
        "warm_to_cold": round(median(after / before for before, after in warm), 4),
    }
