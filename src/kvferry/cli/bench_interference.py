"""What loading and storing cost an engine that has other things to do.

    prefill   batches of prompts in two engines, in turn: with stores, and without kvferry
    decode    requests that decode, while others are loaded, and while others are stored; beside an
              engine without a connector, and one with a connector that does nothing
    profile   which calls blocked the engine's thread meanwhile, and whose they were
    slow      time to first token over a store that reads more slowly than the engine computes

The two engines share the device; one of them idles while the other is measured. The one with the
idle connector has it alone, before them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from kvferry.cli import shapes
from kvferry.cli.bench_ttft import ask
from kvferry.cli.engine_process import EngineProcess
from kvferry.cli.engine_runs import (
    READY_S,
    Engines,
    Plan,
    Prompts,
    Store,
    chunk_tokens,
    store_options,
    token_bytes,
)
from kvferry.clock import Clock
from kvferry.errors import ConfigError, UnavailableError

PARTS = ("prefill", "decode", "profile", "slow")
IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "kvferry.cli.idle_connector",
    "kv_role": "kv_both",
}
BATCH_PROMPTS = 4
COLD_PROMPTS = 5
DECODING = 32
DECODING_TOKENS = 256
ANSWER_TOKENS = 4096
"""More than the phases last."""
LEARNING_TOKENS = 4
"""Of answers from which the cost model learns how fast prompts are computed: when the next step
begins, so there has to be one."""
UNMIXED = 3
"""A step counts if nothing but decoding was scheduled in it and in so many before: with
asynchronous scheduling what a step returns was scheduled earlier."""
PROFILED_STEPS = 12
PROFILE = (
    "frames",
    "frames_of_kvferry",
    "calls",
    "blocking",
    "blocking_of_kvferry",
    "places_of_kvferry",
)
SLOWNESS = 5.0
"""How much longer the slow store takes to read a token than the engine to compute it."""


@dataclass(frozen=True)
class Load:
    """`rounds`: of batches, and of the phases of decoding. `arrivals`: in each phase. `steps`: of
    a quiet phase, and of one that stores after its arrivals have their first tokens."""

    rounds: int
    arrivals: int
    steps: int

    @property
    def slow_prompts(self) -> int:
        return 2 * self.rounds

    @property
    def long_prompts(self) -> int:
        """That are stored, of the plan's first length."""
        return self.rounds * (BATCH_PROMPTS + 2 * self.arrivals) + self.arrivals + 4

    @property
    def short_prompts(self) -> int:
        return self.slow_prompts + 2 * COLD_PROMPTS + 2


def chosen(words: str) -> list[str]:
    """Parts by their names. Raises ConfigError."""
    wanted = list(PARTS) if words == "all" else words.split(",")
    if unknown := set(wanted) - set(PARTS):
        message = f"--parts: {', '.join(PARTS)}, and not {', '.join(sorted(unknown))}"
        raise ConfigError("bench.parts", message)
    return wanted


class Bench:
    """Measures prompts of the plan's first length, over the slow store those of its last. `wrong`
    says what did not happen that was to be measured, and what blocked."""

    def __init__(self, plan: Plan, load: Load, clock: Clock):
        self._plan = plan
        self._load = load
        self._clock = clock
        self._engines = Engines(replace(plan, settings=_settings(plan)), clock)
        self._long, self._short = plan.token_counts[0], plan.token_counts[-1]
        self._prompts = Prompts(plan, 1)
        self._store: Store | None = None
        self._idle_ms: list[float] = []
        self.wrong: list[str] = []

    def run(self, parts: Sequence[str]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if "decode" in parts:
            self._tried("decode", self._decode_idle)
        with ExitStack() as stack:
            plain = stack.enter_context(self._engines.opened("plain"))
            self._prompts = Prompts(self._plan, chunk_tokens(self._plan, self._engines.facts))
            self._store = Store(self._plan.folder / "store", self._clock, self._options())
            stores = stack.enter_context(self._engines.opened("stores", self._store.transfer))
            stores.call("rest", duration_s=READY_S)
            for engine in (plain, stores):
                self._prompts.warm_up(engine)
            cold_ms = self._cold_ms(plain)
            self._fill(stores)
            measures = {"prefill": self._prefill, "decode": self._decode, "profile": self._profile}
            for part in filter(parts.__contains__, measures):
                result[part] = self._tried(part, measures[part], plain, stores)
        if "slow" in parts:
            result["slow"] = self._tried("slow", self._slow, cold_ms)
        self._store.remove()
        return self._about() | result | {"wrong": self.wrong}

    def _tried(self, part: str, measure: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """An engine that is gone costs this part, not those before it."""
        try:
            return measure(*arguments)
        except UnavailableError as error:
            self.wrong.append(f"{part}: {error.message}")
            return {"failed": error.message}

    def _about(self) -> dict[str, Any]:
        return {
            "shape": self._plan.shape_name,
            "mode": self._plan.mode,
            **self._engines.facts,
            "settings": self._engines.plan.settings,
            "options": self._plan.options,
            "start_s": self._engines.start_s,
            "prompt_tokens": self._prompts.length(self._long),
            "slow_prompt_tokens": self._prompts.length(self._short),
        }

    def _options(self) -> dict[str, Any]:
        load = self._load
        tokens = load.long_prompts * self._long + load.short_prompts * self._short
        return store_options(self._plan, tokens * token_bytes(self._plan, self._engines.facts))

    def _fresh(self, name: str) -> list[int]:
        return self._prompts.one(self._long, name)

    def _loads(self, turn: int) -> list[list[int]]:
        """What is in the store and is loaded in a round; in the one after the last: profiled."""
        return [self._fresh(f"load {turn} {index}") for index in range(self._load.arrivals)]

    def _slow_prompts(self) -> list[list[int]]:
        """What is in the store, and may be loaded over the slow store."""
        names = (f"slow {index}" for index in range(self._load.slow_prompts))
        return [self._prompts.one(self._short, name) for name in names]

    def _cold_ms(self, engine: EngineProcess) -> list[float]:
        return [ask(engine, prompt)["ms"] for prompt in self._cold_prompts()]

    def _cold_prompts(self) -> list[list[int]]:
        """Short ones that nobody has."""
        names = (self._clock.random_bytes(8).hex() for _ in range(COLD_PROMPTS))
        return [self._prompts.one(self._short, name) for name in names]

    def _fill(self, stores: EngineProcess) -> None:
        turns = range(self._load.rounds + 1)
        page_count = self._store.rest()
        for prompt in [*(p for turn in turns for p in self._loads(turn)), *self._slow_prompts()]:
            ask(stores, prompt)
            page_count += len(prompt) // self._prompts.chunk_tokens
            if self._store.wait_for(page_count) < page_count:
                self.wrong.append("a prompt was not stored")
        if not stores.call("reset"):
            self.wrong.append("the engine's own cache was not reset")

    def _prefill(self, plain: EngineProcess, stores: EngineProcess) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {"without": [], "stores": []}
        engines = {"without": plain, "stores": stores}
        first_count = self._store.rest()
        for turn in range(self._load.rounds):
            batch = [self._fresh(f"batch {turn} {index}") for index in range(BATCH_PROMPTS)]
            for name in sorted(engines, reverse=bool(turn % 2)):
                seconds[name].append(engines[name].call("batch", prompts=batch))
                if name == "stores":
                    self._store.rest()
        batch_pages = BATCH_PROMPTS * len(batch[0]) // self._prompts.chunk_tokens
        stored_pages = self._store.page_count() - first_count
        medians = {name: median(found) for name, found in seconds.items()}
        tokens = BATCH_PROMPTS * len(batch[0])
        return {
            "tokens_per_s": {name: round(tokens / s) for name, s in medians.items()},
            "throughput_ratio": round(medians["without"] / medians["stores"], 4),
            "stored_share": round(stored_pages / (self._load.rounds * batch_pages), 3),
            "seconds": {name: [round(s, 4) for s in found] for name, found in seconds.items()},
        }

    def _decode_idle(self) -> dict[str, Any]:
        """What vLLM itself takes for any connector."""
        with self._engines.opened("idle", IDLE) as engine:
            self._idle_ms = self._decode_alone(engine)
        return {}

    def _decode_alone(self, engine: EngineProcess) -> list[float]:
        self._start(engine)
        steps = engine.call("steps.run", arrivals=[], step_count=3 * self._load.steps)
        engine.call("steps.end")
        return _pure(steps)

    def _decode(self, plain: EngineProcess, stores: EngineProcess) -> dict[str, Any]:
        load = self._load
        found: dict[str, list[float]] = {
            "without": self._decode_alone(plain),
            "idle_connector": self._idle_ms,
            "quiet": [],
            "loading": [],
            "storing": [],
        }
        rates: dict[str, list[float]] = {"loading": [], "storing": []}
        self._start(stores)
        for turn in range(load.rounds):
            found["quiet"] += _pure(stores.call("steps.run", arrivals=[], step_count=load.steps))
            loads = stores.call("steps.run", arrivals=self._loads(turn), step_count=1)
            self._check_loads(loads["cached_tokens"])
            found["loading"] += _pure(loads, "reads")
            rates["loading"].append(_gb_per_s(loads))
            fresh = [self._fresh(f"new {turn} {index}") for index in range(load.arrivals)]
            new = stores.call("steps.run", arrivals=fresh, step_count=load.steps)
            found["storing"] += _pure(new, "writes")
            rates["storing"].append(_gb_per_s(new))
        stores.call("steps.end")
        for name, times in found.items():
            if not times:
                self.wrong.append(f"decode: no step of {DECODING} requests alone: {name}")
        return _decode_summary(found, rates)

    def _profile(self, plain: EngineProcess, stores: EngineProcess) -> dict[str, Any]:
        """The same arrivals in both; the store has one of them."""
        arrivals = [self._loads(self._load.rounds)[0], self._fresh("profiled")]
        result = {}
        for name, engine in {"without": plain, "kvferry": stores}.items():
            self._start(engine)
            found = engine.call(
                "steps.profile",
                arrivals=arrivals,
                step_count=PROFILED_STEPS,
                folder=str(self._plan.folder),
            )
            engine.call("steps.end")
            result[name] = {"steps": len(found["steps"])} | {what: found[what] for what in PROFILE}
        self._check_loads(found["cached_tokens"][:1])
        self._check_profile(result["kvferry"])
        return result

    def _check_profile(self, found: Mapping[str, Any]) -> None:
        if not found["frames_of_kvferry"]:
            self.wrong.append("profile: no frame of kvferry was seen")
        if self._engines.facts["device"] != "CPU" and not found["calls"]:
            self.wrong.append("profile: no call of CUDA was seen")
        for name, count in found["blocking_of_kvferry"].items():
            self.wrong.append(f"profile: {count} {name} in {found['places_of_kvferry']}")

    def _check_loads(self, cached_tokens: Sequence[int]) -> None:
        expected = self._prompts.loadable(self._long)
        for found in cached_tokens:
            if found != expected:
                self.wrong.append(f"an arrival loaded {found} tokens, not {expected}")

    def _start(self, engine: EngineProcess) -> None:
        prompts = [
            shapes.prompt(self._plan.shape, DECODING_TOKENS, f"decodes {index}")
            for index in range(DECODING)
        ]
        engine.call("steps.start", prompts=prompts, answer_tokens=ANSWER_TOKENS)

    def _slow(self, cold_ms: Sequence[float]) -> dict[str, Any]:
        """Each stored prompt once, in a fresh process with the cost model on."""
        prompt_bytes = self._short * token_bytes(self._plan, self._engines.facts)
        rate = prompt_bytes / (median(cold_ms) / 1e3) / SLOWNESS
        options = {**self._options(), "cost_model": True}
        transfer = Store(self._plan.folder / "store", self._clock, options).transfer
        disk = {"read_bytes_per_s": rate, "write_bytes_per_s": rate}
        with self._engines.opened("slow", transfer, **disk) as engine:
            for prompt in self._cold_prompts():
                ask(engine, prompt, LEARNING_TOKENS)
            answers = [ask(engine, prompt) for prompt in self._slow_prompts()]
            own_ms = self._cold_ms(engine)
            metrics = engine.call("metrics")
        loaded_tokens = [answer["cached_tokens"] for answer in answers]
        if all(loaded_tokens):
            self.wrong.append("slow: no load was declined")
        return {
            "disk_gb_per_s": round(rate / 1e9, 3),
            "recomputed_ms": round(median(own_ms), 2),
            "ratios_to_recomputed": [round(each["ms"] / median(own_ms), 3) for each in answers],
            "loaded_tokens": loaded_tokens,
            "metrics": {
                name: round(value, 1)
                for name, value in metrics.items()
                if name.startswith(("kvferry_load", "kvferry_prefill"))
            },
        }


def _settings(plan: Plan) -> dict[str, Any]:
    """Room for two engines on one device, and for arrivals beside what decodes."""
    return {
        "gpu_memory_utilization": 0.4,
        "max_num_seqs": 2 * DECODING,
        "max_model_len": max(*plan.token_counts, DECODING_TOKENS + ANSWER_TOKENS) + 64,
        **plan.settings,
    }


def _gb_per_s(found: Mapping[str, Any]) -> float:
    return found["moved_bytes"] / found["duration_s"] / 1e9


def _pure(found: Mapping[str, Any], during: str | None = None) -> list[float]:
    """Milliseconds of the steps that count; `during`: those with reads, or writes, under way at
    their begin and end."""
    column = {"reads": 3, "writes": 4}.get(during or "")
    return list(_counted(found["steps"], column))


def _counted(steps: Sequence[Sequence[float]], column: int | None) -> Iterator[float]:
    for index in range(UNMIXED, len(steps)):
        recent = steps[index - UNMIXED : index + 1]
        is_pure = all(step[1] == DECODING for step in recent)
        if is_pure and (column is None or (recent[-2][column] and recent[-1][column])):
            yield recent[-1][0]


def _decode_summary(
    found: Mapping[str, Sequence[float]], rates: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    seen = {name: times for name, times in found.items() if times}
    quiet = seen.get("quiet", [1.0])
    return {
        "requests": DECODING,
        "step_counts": {name: len(times) for name, times in found.items()},
        "median_ms": {name: round(median(times), 3) for name, times in seen.items()},
        "mean_ms": {name: round(mean(times), 3) for name, times in seen.items()},
        "median_to_quiet": {
            name: round(median(times) / median(quiet), 4) for name, times in seen.items()
        },
        "mean_to_quiet": {
            name: round(mean(times) / mean(quiet), 4) for name, times in seen.items()
        },
        "moved_gb_per_s": {name: round(median(each), 2) for name, each in rates.items()},
    }
