"""What a metric is: a line of the table in `metric_table`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvferry.errors import InternalError

ANY: tuple[str, ...] = ()
"""The values of a label that nobody knows beforehand."""


class Kind(Enum):
    """As in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. `labels`: each label with all its values, or `ANY`."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    action: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def label_key(self, labels: Mapping[str, str]) -> str:
        """The inner key of a snapshot. Raises InternalError on a label that is not in the table."""
        if labels.keys() != self.labels.keys():
            raise InternalError(
                "metrics.labels", f"{self.name} has labels {list(self.labels)}", got=dict(labels)
            )
        for name, value in labels.items():
            if self.labels[name] is not ANY and value not in self.labels[name]:
                raise InternalError("metrics.label", f"{self.name}: {name}={value!r} is not known")
        return ",".join(labels[name] for name in self.labels)


def counter(name: str, unit: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}_total", Kind.COUNTER, unit, meaning, action, labels)


def gauge(name: str, unit: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}", Kind.GAUGE, unit, meaning, action, labels)


def seconds(name: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}_seconds", Kind.HISTOGRAM, "seconds", meaning, action, labels)
