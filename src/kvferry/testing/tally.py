"""Counts by short names, for tests of what is counted in the table of metrics."""

from collections import Counter

from kvferry.metric_table import METRICS


class Tally(Counter):
    """Has `Metrics`' verbs, and as it refuses what the table does not have. A count is found as
    `tally["name"]` or `tally["name.label"]`, without the prefix of the transfer connector."""

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        METRICS[name].label_key(labels)
        self[".".join((name.removeprefix("kvferry_transfer_"), *labels.values()))] += value

    def set(self, name: str, value: float) -> None:
        assert name in METRICS
        self[name.removeprefix("kvferry_transfer_")] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.count(name, 1, **labels)
