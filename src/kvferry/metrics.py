"""Counting: what each process counts, how counts cross processes, how Prometheus sees them.

Which metrics there are, and what to do about each, stands in `metric_table`.

Each process counts in one `Metrics`. What vLLM carries between processes is a *snapshot*: plain
dicts of text and numbers, so that it can be encoded and merged without this class:

    {"kvferry_lookups_total": {"hit": 3, "miss": 1}, "kvferry_load_seconds": {"": [[2, 0.3], ...]}}

The inner key is the label values, joined by commas ("" without labels). A histogram is one
[count, sum] for each bucket, the last one unbounded. Merging adds counters and histograms; of a
gauge the greatest value stays, so gauges are made such that the greatest is the one to look at.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.errors import InternalError
from kvferry.metric import Kind, Metric
from kvferry.metric_table import METRICS

Snapshot = dict[str, dict[str, Any]]

LABEL_VALUES_MAX = 64
"""Of a label that takes any value, in one process; what comes later is counted as `OTHERS`."""
OTHERS = "others"


class Metrics:
    """The counts of one process. Any thread may call any method; each takes a few microseconds.

    A name or label that is not in the table is an InternalError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drained: Snapshot = {}
        self._pending: Snapshot = {}
        self._gauges: dict[str, float] = {}
        self._open_keys: dict[str, set[str]] = {}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        metric = _metric(name, Kind.COUNTER)
        key = metric.label_key(labels)
        with self._lock:
            key = self._bounded(metric, key)
            values = self._pending.setdefault(name, {})
            values[key] = values.get(key, 0) + value

    def set(self, name: str, value: float) -> None:
        """Sets a gauge."""
        _metric(name, Kind.GAUGE)
        with self._lock:
            if self._gauges.get(name) != value:
                self._gauges[name] = value
                self._pending[name] = {"": value}

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        metric = _metric(name, Kind.HISTOGRAM)
        key = metric.label_key(labels)
        with self._lock:
            key = self._bounded(metric, key)
            buckets = self._pending.setdefault(name, {}).setdefault(key, _no_buckets(metric))
            bucket = buckets[bisect_left(metric.buckets, value)]
            bucket[0] += 1
            bucket[1] += value

    def value(self, name: str, **labels: str) -> float:
        """A counter's or gauge's value since the start, 0 if it never moved."""
        key = METRICS[name].label_key(labels)
        with self._lock:
            if name in self._gauges:
                return self._gauges[name]
            return sum(part.get(name, {}).get(key, 0) for part in (self._drained, self._pending))

    def snapshot(self) -> Snapshot:
        """A copy of everything since the start."""
        with self._lock:
            gauges = {name: {"": value} for name, value in self._gauges.items()}
            return merge([self._drained, self._pending]) | gauges

    def drain(self) -> Snapshot:
        """What was counted since the last drain, and the gauges that moved. Costs only what moved;
        empty if nothing did."""
        if not self._pending:
            return {}
        with self._lock:
            moved, self._pending = self._pending, {}
            _add(self._drained, moved)
            return moved

    def _bounded(self, metric: Metric, key: str) -> str:
        """Under the lock. Peers come and go; whoever stores these metrics keeps each for ever."""
        if not metric.is_open:
            return key
        known = self._open_keys.setdefault(metric.name, set())
        if len(known) < LABEL_VALUES_MAX:
            known.add(key)
        return key if key in known else OTHERS


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot of several processes. Names that this version does not know are left out."""
    merged: Snapshot = {}
    for snapshot in snapshots:
        _add(merged, snapshot)
    return merged


def _add(total: Snapshot, snapshot: Snapshot) -> None:
    for name, values in snapshot.items():
        if name in METRICS:
            target = total.setdefault(name, {})
            for key, value in _copy_values(values).items():
                target[key] = _sum(name, target[key], value) if key in target else value


class Exporter:
    """Shows drained snapshots to Prometheus. One thread calls `observe`.

    `counter`, `gauge`, `histogram`: classes with the interface of `prometheus_client` (vLLM brings
    its own); `label_names`: labels that every metric has besides its own; `names`: which metrics
    are shown, and under what names (None: all, under their own).
    """

    def __init__(
        self,
        counter: Any,
        gauge: Any,
        histogram: Any,
        label_names: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        names = {name: name for name in METRICS} if names is None else names
        makers = {Kind.COUNTER: counter, Kind.GAUGE: gauge, Kind.HISTOGRAM: histogram}
        self._metrics = {
            metric.name: makers[metric.kind](
                name=names[metric.name],
                documentation=metric.meaning,
                labelnames=[*label_names, *metric.labels],
                **({"buckets": metric.buckets} if metric.kind is Kind.HISTOGRAM else {}),
            )
            for metric in METRICS.values()
            if metric.name in names
        }

    def observe(self, drained: Snapshot, label_values: Sequence[Any] = ()) -> None:
        """Adds what was counted since the last call."""
        for name in drained.keys() & self._metrics.keys():
            for key, value in drained[name].items():
                all_labels = [*label_values, *(key.split(",") if key else ())]
                target = self._metrics[name]
                _export(
                    METRICS[name].kind, target.labels(*all_labels) if all_labels else target, value
                )


def prometheus_exporter(registry: Any = None) -> Exporter:
    """An exporter to a registry of `prometheus_client` (None: its default one)."""
    import prometheus_client  # noqa: PLC0415  imported by those who export only

    target = {"registry": registry or prometheus_client.REGISTRY}

    def into_registry(metric_class: Any) -> Any:
        return lambda **arguments: metric_class(**arguments, **target)

    return Exporter(
        into_registry(prometheus_client.Counter),
        into_registry(prometheus_client.Gauge),
        into_registry(prometheus_client.Histogram),
    )


def _export(kind: Kind, target: Any, value: Any) -> None:
    if kind is Kind.COUNTER:
        target.inc(value)
    elif kind is Kind.GAUGE:
        target.set(value)
    else:
        for count, total in value:
            for _ in range(count):
                target.observe(total / count)


def _metric(name: str, kind: Kind) -> Metric:
    metric = METRICS.get(name)
    if metric is None or metric.kind is not kind:
        raise InternalError("metrics.name", f"no {kind.value} is called {name!r}")
    return metric


def _no_buckets(metric: Metric) -> list[list[float]]:
    return [[0, 0.0] for _ in range(len(metric.buckets) + 1)]


def _copy_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [list(bucket) for bucket in value] if isinstance(value, list) else value
        for key, value in values.items()
    }


def _sum(name: str, a: Any, b: Any) -> Any:
    kind = METRICS[name].kind
    if kind is Kind.GAUGE:
        return max(a, b)
    if kind is Kind.COUNTER:
        return a + b
    return [[x + y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]
