"""What a metric is: a line of the table in `metric_table`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvferry.errors import InternalError


class Kind(Enum):
    """As in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


ANY: tuple[str, ...] = ()
"""Values of a label that nobody knows beforehand, such as peers."""
SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SIZE_BUCKETS = tuple(float(1 << exponent) for exponent in range(12, 31, 2))
COUNT_BUCKETS = tuple(float(1 << exponent) for exponent in range(0, 17, 2))


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. `labels`: each label with all its values, or `ANY`; at most one label.
    `buckets`: of a histogram, upper ends in its unit."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    action: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    def label_key(self, labels: Mapping[str, str]) -> str:
        """The inner key of a snapshot. Raises InternalError on a label that is not in the table."""
        if labels.keys() != self.labels.keys():
            raise InternalError(
                "metrics.labels", f"{self.name} has labels {list(self.labels)}", got=dict(labels)
            )
        for name, value in labels.items():
            if value not in self.labels[name] and self.labels[name] != ANY:
                raise InternalError("metrics.label", f"{self.name}: {name}={value!r} is not known")
        return ",".join(labels[name].replace(",", ";") or "?" for name in self.labels)

    @property
    def is_open(self) -> bool:
        """Whether its label takes any value."""
        return ANY in self.labels.values()


def counter(name: str, unit: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}_total", Kind.COUNTER, unit, meaning, action, labels)


def gauge(name: str, unit: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}", Kind.GAUGE, unit, meaning, action, labels)


def seconds(name: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return histogram(f"{name}_seconds", "seconds", meaning, action, SECONDS_BUCKETS, **labels)


def histogram(
    name: str,
    unit: str,
    meaning: str,
    action: str,
    buckets: tuple[float, ...],
    **labels: tuple[str, ...],
) -> Metric:
    return Metric(f"kvferry_{name}", Kind.HISTOGRAM, unit, meaning, action, labels, buckets)
