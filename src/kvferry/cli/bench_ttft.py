"""Time to first token of a real engine: cold, from its own cache, and from the store.

Engines follow each other, each in a process of its own:

    plain   without kvferry: each prompt cold, then as the engine's own prefix hit
    store   over an empty store: each prompt cold while it is stored, then, when the engine's own
            cache was forgotten, loaded in the same process
    load    over the same store: each prompt once, loaded

Prompts are 8 tokens longer than a multiple of a chunk, so that a hit of the engine's own cache and
one of the store have the same length: the same KV, the same shapes, and so the same answer to the
last bit. What is otherwise, or not loaded to the last full chunk, is `wrong`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from kvferry.cli import output
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

STORING_TRIES = 3
ANSWER_TOKENS = 16
"""A longer answer than one token: what the KV is worth."""

COMPUTED = ("cold", "storing")
FAILURES = ("kvferry_load_failures", "kvferry_internal_errors", "kvferry_standing_aside")

Answer = Mapping[str, Any]


class Bench:
    """Measures; `wrong` says what does not hold."""

    def __init__(self, plan: Plan, clock: Clock):
        self.plan = plan
        self.engines = Engines(plan, clock)
        self.prompts = Prompts(plan, 1)
        self.times_ms: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.wrong: list[str] = []
        self._clock = clock
        self.own_hits: list[Answer] = []
        self.late_pages = 0
        self._link_bytes_per_s = 0.0

    def run(self) -> dict[str, Any]:
        self._plain()
        options = store_options(self.plan, self.stored_bytes())
        store = Store(self.plan.folder / "store", self._clock, options)
        self._store(store)
        with self.engines.opened("load", store.transfer) as engine:
            self.prompts.warm_up(engine)
            self.loaded(engine, "loaded")
        store.remove()
        return self._summary()

    def stored_bytes(self) -> int:
        return self.prompts.stored_tokens() * token_bytes(self.plan, self.engines.facts)

    def _measure(
        self, engine: EngineProcess, case: str, token_count: int, prompt: Sequence[int]
    ) -> None:
        answer = ask(engine, prompt)
        self.times_ms[case][token_count].append(answer["ms"])
        output.complain(f"{case}, {token_count} tokens: {answer['ms']:.1f} ms")
        expected = 0 if case in COMPUTED else self.prompts.loadable(token_count)
        if answer["cached_tokens"] != expected:
            found = answer["cached_tokens"]
            self.wrong.append(f"{case}, {token_count} tokens: {found} were there, not {expected}")

    def loaded(self, engine: EngineProcess, case: str) -> None:
        """Asks all prompts; each is to be loaded as far as its full chunks go. Bytes are counted
        too, since vLLM before 0.30 calls tokens cached whose load failed."""
        for index, (token_count, prompt) in enumerate(self.prompts.all()):
            before_bytes = engine.call("traffic")["read_bytes"]
            self._measure(engine, case, token_count, prompt)
            read_bytes = engine.call("traffic")["read_bytes"] - before_bytes
            name = f"{case}, {token_count} tokens, prompt {index % self.plan.prompt_count}"
            if read_bytes < self._loaded_bytes(token_count):
                self.wrong.append(f"{name}: only {read_bytes} bytes read")
            self._compare(name, ask(engine, prompt, ANSWER_TOKENS), self.own_hits[index])
        for metric, count in engine.call("metrics").items():
            if metric.startswith(FAILURES):
                self.wrong.append(f"{case}: {metric} {count:.0f}")

    def _plain(self) -> None:
        with self.engines.opened("plain") as engine:
            self.prompts = Prompts(self.plan, chunk_tokens(self.plan, self.engines.facts))
            self._link_bytes_per_s = engine.call("link")
            self.prompts.warm_up(engine)
            for token_count, prompt in self.prompts.all():
                self._measure(engine, "cold", token_count, prompt)
                self._measure(engine, "own_hit", token_count, prompt)
                self.own_hits.append(ask(engine, prompt, ANSWER_TOKENS))

    def _store(self, store: Store) -> None:
        with self.engines.opened("store", store.transfer) as engine:
            engine.call("rest", duration_s=READY_S)
            self.prompts.warm_up(engine)
            for token_count, prompt in self.prompts.all():
                before_count = store.rest()
                self._measure(engine, "storing", token_count, prompt)
                page_count = self.prompts.loadable(token_count) // self.prompts.chunk_tokens
                self._complete(engine, store, prompt, before_count + page_count)
            if not engine.call("reset"):
                self.wrong.append("the engine's own cache was not reset")
            self.loaded(engine, "loaded_same_process")

    def _complete(
        self, engine: EngineProcess, store: Store, prompt: Sequence[int], page_count: int
    ) -> None:
        """Asks again for pages that found no slot: a new store grows more slowly than a fast
        engine computes."""
        missing_count = page_count - store.rest()
        self.late_pages += missing_count
        for _ in range(STORING_TRIES):
            if not missing_count:
                return
            engine.call("reset")
            ask(engine, prompt)
            missing_count = page_count - store.rest()
        if missing_count:
            self.wrong.append(f"{missing_count} pages were not stored")

    def _loaded_bytes(self, token_count: int) -> int:
        return self.prompts.loadable(token_count) * token_bytes(self.plan, self.engines.facts)

    def _compare(self, name: str, answer: Answer, own_hit: Answer) -> None:
        """With dummy weights answers mean nothing."""
        for what in ("tokens", "logprobs") if self.plan.is_seeded else ():
            if answer[what] != own_hit[what]:
                self.wrong.append(f"{name}: other {what} than the engine's own hit")

    def _summary(self) -> dict[str, Any]:
        link_gb_per_s = self._link_bytes_per_s / 1e9
        return {
            "shape": self.plan.shape_name,
            "weights": "seeded" if self.plan.is_seeded else "dummy",
            "mode": self.plan.mode,
            **self.engines.facts,
            "settings": self.plan.settings,
            "options": self.plan.options,
            "start_s": self.engines.start_s,
            "link_gb_per_s": round(link_gb_per_s, 2),
            "late_pages": self.late_pages,
            "lengths": [self._row(token_count) for token_count in self.plan.token_counts],
            "wrong": self.wrong,
        }

    def _row(self, token_count: int) -> dict[str, Any]:
        loadable = self.prompts.loadable(token_count)
        loaded_bytes = self._loaded_bytes(token_count)
        link_ms = loaded_bytes / self._link_bytes_per_s * 1e3
        found = {case: times[token_count] for case, times in self.times_ms.items()}
        medians = {case: median(times) for case, times in found.items()}
        least_ms = medians["own_hit"] + link_ms
        return {
            "prompt_tokens": self.prompts.length(token_count),
            "loaded_tokens": loadable,
            "loaded_mb": round(loaded_bytes / 1e6, 1),
            "link_ms": round(link_ms, 2),
            "median_ms": {case: round(ms, 2) for case, ms in medians.items()},
            "ratios": {
                "storing_to_cold": round(medians["storing"] / medians["cold"], 3),
                "loaded_to_cold": round(medians["loaded"] / medians["cold"], 3),
                "loaded_to_own_hit_and_link": round(medians["loaded"] / least_ms, 3),
            },
            "all_ms": {case: [round(ms, 1) for ms in times] for case, times in found.items()},
        }


def curves(result: Mapping[str, Any]) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """Title and lines of the plot."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in result["lengths"]:
        for case, ms in row["median_ms"].items():
            lines[case.replace("_", " ")].append((row["prompt_tokens"], ms))
        lines["the link alone"].append((row["prompt_tokens"], row["link_ms"]))
    for peer, found in result.get("peers", {}).items():
        for row in found["lengths"]:
            if "loaded" in row["median_ms"]:
                point = (row["prompt_tokens"], row["median_ms"]["loaded"])
                lines[f"{peer.replace('_', ' ')}, loaded"].append(point)
    return f"time to first token, {result['shape']} shape, {result['device']}", lines


def ask(engine: EngineProcess, prompt: Sequence[int], answer_tokens: int = 1) -> Answer:
    return engine.call("ask", prompts=[prompt], answer_tokens=answer_tokens)[0]
