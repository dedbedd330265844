"""Counters on their way from the engine's processes to vLLM's metrics.

vLLM carries `Stats` from workers and scheduler to the process that serves its metrics, merging
them as they pass, and shows them under `vllm:kvferry_...` beside its own.
"""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.metric_table import METRICS, Kind
from kvferry.metrics import Exporter, Snapshot, merge
from kvferry.vllm_plugin.versions import SubscriptableStats

PREFIX = "vllm:"
"""With it, vLLM treats these metrics as its own, also when an engine follows another one in the
same process."""


class Stats(SubscriptableStats):
    """`data`: a snapshot of what was counted since the last one."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = merge([self.data, other.data])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Totals for vLLM's log line: counters that moved, and gauges."""
        return {
            name.removeprefix("kvferry_"): sum(values.values())
            for name, values in self.data.items()
            if METRICS[name].kind is not Kind.HISTOGRAM
        }

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


class PrometheusMetrics(KVConnectorPromMetrics):
    """Shows the snapshots to Prometheus, in the process that serves vLLM's metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        label_names: list[str],
        label_values: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, label_names, label_values)
        self._exporter = Exporter(
            _named(self._counter_cls),
            _named(self._gauge_cls),
            _named(self._histogram_cls),
            label_names,
        )

    def observe(self, transfer_stats_data: Snapshot, engine_idx: int = 0) -> None:
        self._exporter.observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])


def _named(metric_class: Any) -> Any:
    return lambda *, name, **arguments: metric_class(name=PREFIX + name, **arguments)
