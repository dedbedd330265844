"""All that the status page shows, as one JSON document, made again and again.

What is wrong comes first, each with what to do about it: an operator who is called at night reads
that and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import kvferry
from kvferry.cli.output import size_text
from kvferry.cli.view.engines import REASONS, SUMS, EngineLook, EngineWatch
from kvferry.cli.view.history import History, series
from kvferry.cli.view.sampler import Sample, Sampler
from kvferry.cli.view.store import Prefix, StoreLook
from kvferry.clock import Clock
from kvferry.metric_table import METRICS

SPAN_S = 1800.0
RECENT_S = 600.0
RATE_S = 30.0
POINTS_MAX = 180
PREFIXES_MAX = 10
HEAT_MINUTES = 60

HARMLESS = ("closing", "reset", "rewritten", "duplicate")
"""Reasons of dropped stores that nobody has to do anything about."""


class Wrong(msgspec.Struct, frozen=True):
    """`level`: "bad" or "warning"."""

    level: str
    what: str
    action: str


@dataclass(frozen=True)
class Engine:
    """One that the operator has listed."""

    watch: EngineWatch
    sampler: Sampler[EngineLook]


class Heat:
    """In how many of the last minutes prefixes were used, as far as it was looked at. One
    thread."""

    def __init__(self) -> None:
        self._minutes: dict[tuple[str, str], set[int]] = {}

    def add(self, now_s: float, prefixes: Sequence[Prefix]) -> list[dict[str, Any]]:
        """The hottest ones, with `minutes`."""
        now = int(now_s // 60)
        for prefix in prefixes:
            used = self._minutes.setdefault((prefix.namespace, prefix.key), set())
            used.add(now - prefix.idle_minutes)
        for name, minutes in list(self._minutes.items()):
            kept = {minute for minute in minutes if minute > now - HEAT_MINUTES}
            if kept:
                self._minutes[name] = kept
            else:
                del self._minutes[name]
        rows = [
            msgspec.to_builtins(prefix)
            | {"minutes": len(self._minutes.get((prefix.namespace, prefix.key), ()))}
            for prefix in prefixes
        ]
        rows.sort(key=lambda row: (-row["minutes"], row["idle_minutes"], -row["pages"]))
        return rows[:PREFIXES_MAX]


class State:
    """Puts together what samplers saw. `text` is made on one thread: a sampler's."""

    def __init__(
        self,
        store: Sampler[StoreLook],
        engines: Sequence[Engine],
        refused: Mapping[str, int],
        clock: Clock,
        interval_s: float,
    ):
        """`refused`: what the page's own port refused, by reason; it is read while it grows."""
        self._refused = refused
        self._store = store
        self._engines = engines
        self._clock = clock
        self._interval_s = interval_s
        self._history = History(SPAN_S)
        self._of_engine = {engine.watch.name: History(SPAN_S) for engine in engines}
        self._heat = Heat()

    def text(self) -> bytes:
        now_s = self._clock.now_s()
        store = self._store.latest()
        engines = [(engine, engine.sampler.latest()) for engine in self._engines]
        self._add(store, engines)
        rows = [self._engine(engine, sample) for engine, sample in engines]
        return msgspec.json.encode(
            {
                "version": kvferry.__version__,
                "at": self._clock.wall_s(),
                "interval_s": self._interval_s,
                "recent_s": RECENT_S,
                "wrong": [*self._wrong_store(store), *self._wrong_engines(engines)],
                "store": self._sampled(self._store, store),
                "recent": self._recent(store.value),
                "engines": rows,
                "refused": dict(self._refused),
                "bandwidth": {
                    "load": sum(row["load_bytes_per_s"] or 0 for row in rows),
                    "store": sum(row["store_bytes_per_s"] or 0 for row in rows),
                    "series": series(
                        list(self._of_engine.values()),
                        ("load_bytes_total", "store_bytes_total"),
                        2 * self._interval_s,
                        POINTS_MAX,
                    ),
                },
                "reasons": {name: self._reasons(name, engines) for name in REASONS},
                "prefixes": self._heat.add(now_s, store.value.prefixes) if store.value else [],
            }
        )

    def _add(
        self, store: Sample[StoreLook], engines: list[tuple[Engine, Sample[EngineLook]]]
    ) -> None:
        """Each at the time when it was looked at. A reason that did not happen yet is 0."""
        look = store.value
        if look is not None:
            counters: dict[str, float] = {"evicted": look.evicted, "published": look.published}
            for space in look.namespaces:
                counters[f"{space.namespace} lookups"] = space.lookup_chunks
                counters[f"{space.namespace} hits"] = space.hit_chunks
            self._history.add(store.taken_s, counters)
        for engine, sample in engines:
            if sample.value is None:
                continue
            counters = {name: sample.value.sums.get(name, 0.0) for name in SUMS}
            for name in REASONS:
                reasons = dict.fromkeys(METRICS[f"kvferry_{name}"].labels["reason"], 0.0)
                reasons |= sample.value.reasons[name]
                counters |= {f"{name} {reason}": value for reason, value in reasons.items()}
            self._of_engine[engine.watch.name].add(sample.taken_s, counters)

    def _sampled(self, sampler: Sampler, sample: Sample) -> dict[str, Any]:
        return {
            "is_up": sample.is_up,
            "error": sample.error,
            "age_s": sampler.age_s(sample),
            "look": sample.value and _without_prefixes(sample.value),
        }

    def _recent(self, look: StoreLook | None) -> dict[str, Any]:
        names = [space.namespace for space in look.namespaces] if look else []
        return {
            "evicted": self._history.grown("evicted", RECENT_S),
            "published": self._history.grown("published", RECENT_S),
            "namespaces": {
                name: {
                    "lookups": self._history.grown(f"{name} lookups", RECENT_S),
                    "hits": self._history.grown(f"{name} hits", RECENT_S),
                }
                for name in names
            },
        }

    def _engine(self, engine: Engine, sample: Sample[EngineLook]) -> dict[str, Any]:
        look, name = sample.value, engine.watch.name
        history = self._of_engine[name]
        is_known = sample.is_up and look is not None and bool(look.sums)
        rates = {
            f"{what}_bytes_per_s": history.rate(f"{what}_bytes_total", RATE_S) if is_known else None
            for what in ("load", "store")
        }
        return {
            "name": name,
            "is_up": sample.is_up,
            "error": sample.error,
            "has_kvferry": look is not None and bool(look.sums or look.gauges),
            "model": look.model if look else "",
            "gauges": look.gauges if look and sample.is_up else {},
            "lookups": history.grown("lookup_tokens_total", RECENT_S),
            "hits": history.grown("hit_tokens_total", RECENT_S),
            **rates,
        }

    def _reasons(
        self, name: str, engines: list[tuple[Engine, Sample[EngineLook]]]
    ) -> list[dict[str, Any]]:
        """Only those that ever happened."""
        ever: dict[str, float] = {}
        recent: dict[str, float] = {}
        for engine, sample in engines:
            for reason, value in (sample.value.reasons[name] if sample.value else {}).items():
                ever[reason] = ever.get(reason, 0.0) + value
                history = self._of_engine[engine.watch.name]
                grown = history.grown(f"{name} {reason}", RECENT_S)
                recent[reason] = recent.get(reason, 0.0) + grown
        rows = [
            {"reason": reason, "recent": recent[reason], "ever": ever[reason]}
            for reason in ever
            if ever[reason]
        ]
        return sorted(rows, key=lambda row: (-row["recent"], -row["ever"]))

    # What is wrong.

    def _wrong_store(self, store: Sample[StoreLook]) -> list[Wrong]:
        look = store.value
        if not store.is_up:
            if store.error == "not looked at yet":
                return []
            return [
                Wrong(
                    "bad",
                    f"The store's catalog cannot be read: {store.error}",
                    "Engines that cannot read it either serve on as without a cache: mend it, it is"
                    " found again by itself. The figures below are the last ones known.",
                )
            ]
        wrong = []
        if look.engines == 0:
            wrong.append(
                Wrong(
                    "warning",
                    "No engine holds the store.",
                    "Right if none is running; else see the engine's log for why it stands aside.",
                )
            )
        if look.disk_free_bytes < look.capacity_bytes - look.used_bytes:
            free = size_text(look.disk_free_bytes)
            wrong.append(
                Wrong(
                    "warning",
                    f"The disk will be full before the store is: {free} free.",
                    _action("exporter_disk_free_bytes"),
                )
            )
        return wrong

    def _wrong_engines(self, engines: list[tuple[Engine, Sample[EngineLook]]]) -> list[Wrong]:
        wrong = []
        for engine, sample in engines:
            name = engine.watch.name
            if not sample.is_up:
                if sample.error != "not looked at yet":
                    what = f"Engine {name} {sample.error}."
                    wrong.append(Wrong("bad", what, "See whether it runs, and its log."))
            elif sample.value.gauges.get("standing_aside"):
                what = f"kvferry stands aside in engine {name}, after an error of its own."
                wrong.append(Wrong("bad", what, _action("standing_aside")))
            elif sample.value.gauges.get("breaker_open"):
                what = f"The breaker of engine {name} is open: its catalog does not answer."
                wrong.append(Wrong("bad", what, _action("breaker_open")))
        for row in self._reasons("load_failures_total", engines):
            if row["reason"] in ("corrupt", "short", "io_error") and row["recent"]:
                what = f"{row['recent']:.0f} chunks could not be loaded: {row['reason']}."
                wrong.append(Wrong("warning", what, _action("load_failures_total", row["reason"])))
        for row in self._reasons("store_drops_total", engines)[:1]:
            if row["recent"] and row["reason"] not in HARMLESS:
                what = f"Stores are dropped, mostly by {row['reason']}. No request waits for them."
                wrong.append(Wrong("warning", what, _action("store_drops_total", row["reason"])))
        return wrong


def _without_prefixes(look: StoreLook) -> dict[str, Any]:
    fields = msgspec.to_builtins(look)
    del fields["prefixes"]
    return fields


def _action(name: str, reason: str = "") -> str:
    """What the table says to do; only what it says of `reason`, if it does."""
    action = METRICS[f"kvferry_{name}"].action.removeprefix("Alert on it. ")
    sentences = [sentence.rstrip(".") for sentence in action.split(". ")]
    own = [sentence for sentence in sentences if reason and f"`{reason}`" in sentence]
    return ". ".join(own) + "." if own else action
