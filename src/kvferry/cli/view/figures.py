"""A look at a store as Prometheus reads it."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvferry.cli.view.sampler import Sampler
from kvferry.cli.view.server import Refusals
from kvferry.cli.view.store import StoreLook
from kvferry.metric import Kind
from kvferry.metric_table import METRICS

KIND = CONTENT_TYPE_LATEST
PREFIX = "kvferry_exporter_"

_OF_STORE = {
    "capacity_bytes": "capacity_bytes",
    "used_bytes": "used_bytes",
    "disk_free_bytes": "disk_free_bytes",
    "engines": "engines",
    "published_total": "published",
    "duplicates_total": "duplicates",
    "evictions_total": "evicted",
    "reservations_expired_total": "expired",
    "quota_evictions_total": "quota_evicted",
    "quota_refusals_total": "quota_refused",
    "pages_lapsed_total": "lapsed",
}
"""Metric, and the field of `StoreLook`; the next: of `SpaceLook`, of `TenantStatus`."""
_OF_NAMESPACE = {
    "segments": "segments",
    "pages": "pages",
    "page_bytes": "bytes",
    "reserved_slots": "reserved",
    "graced_slots": "graced",
    "lookup_chunks_total": "lookup_chunks",
    "hit_chunks_total": "hit_chunks",
}
_OF_TENANT = {
    "tenant_segments": "segments",
    "tenant_page_bytes": "bytes",
    "tenant_guaranteed_bytes": "guaranteed_bytes",
    "tenant_maximum_bytes": "maximum_bytes",
}


class Figures:
    """A collector of `prometheus_client`. Any thread; never waits."""

    def __init__(self, sampler: Sampler[StoreLook], refusals: Refusals):
        self._sampler = sampler
        self._refusals = refusals
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        sample = self._sampler.latest()
        yield _family("up", [((), sample.is_up)])
        age_s = self._sampler.age_s(sample)
        if age_s is not None:
            yield _family("sample_age_seconds", [((), age_s)])
        reasons = METRICS[PREFIX + "requests_refused_total"].labels["reason"]
        rows = [((reason,), self._refusals[reason]) for reason in reasons]
        yield _family("requests_refused_total", rows)
        if sample.is_up:
            yield from _of(sample.value)


def _of(look: StoreLook) -> Iterator[Any]:
    for name, field in _OF_STORE.items():
        value = getattr(look, field)
        if value is not None:
            yield _family(name, [((), value)])
    for name, field in _OF_NAMESPACE.items():
        rows = [((s.namespace, s.model), getattr(s, field)) for s in look.namespaces]
        yield _family(name, rows)
    for name, field in _OF_TENANT.items():
        values = [(tenant.name, getattr(tenant, field)) for tenant in look.tenants]
        rows = [((who,), look.capacity_bytes if v is None else v) for who, v in values]
        yield _family(name, rows)


def _family(name: str, rows: list[tuple[tuple[str, ...], float]]) -> Any:
    """`rows`: values of labels, and the value."""
    metric = METRICS[PREFIX + name]
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=list(metric.labels))
    for labels, value in rows:
        family.add_metric(labels, float(value))
    return family
