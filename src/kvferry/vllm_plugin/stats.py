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

from kvferry.metric import Kind
from kvferry.metric_table import METRICS
from kvferry.metrics import Exporter, Snapshot, merge
from kvferry.vllm_plugin.versions import SubscriptableStats

PREFIX = "vllm:"
"""With it, vLLM treats these metrics as its own, also when an engine follows another one in the
same process."""

TRANSFER = "kvferry_transfer_"
EXPORTER = "kvferry_exporter_"
CONDITIONS = (
    "kvferry_internal_errors_total",
    "kvferry_standing_aside",
    "kvferry_namespace_resets_total",
)
"""What either connector may have to say; an engine may have both."""

STORE_NAMES = {name: PREFIX + name for name in METRICS if not name.startswith((TRANSFER, EXPORTER))}
TRANSFER_NAMES = {
    name: PREFIX + TRANSFER + name.removeprefix(TRANSFER).removeprefix("kvferry_")
    for name in METRICS
    if name.startswith(TRANSFER) or name in CONDITIONS
}
"""How the metrics of each connector are called where vLLM shows them."""


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
    """Shows the snapshots to Prometheus, in the process that serves vLLM's metrics. `names`: what
    is shown, and how it is called."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        label_names: list[str],
        label_values: dict[int, list[object]],
        names: Mapping[str, str],
    ):
        super().__init__(vllm_config, metric_types, label_names, label_values)
        self._exporter = Exporter(
            self._counter_cls, self._gauge_cls, self._histogram_cls, label_names, names
        )

    def observe(self, transfer_stats_data: Snapshot, engine_idx: int = 0) -> None:
        self._exporter.observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
