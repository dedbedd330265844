"""Counts without the table of metrics."""

from collections import Counter


class Tally(Counter):
    """Has `Metrics`' verbs; a count is found as `tally["name"]` or `tally["name.label"]`."""

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        self[".".join((name.removeprefix("kvferry_transfer_"), *labels.values()))] += value

    def set(self, name: str, value: float) -> None:
        self[name.removeprefix("kvferry_transfer_")] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.count(name, 1, **labels)
