"""What `kvferry route` counts, for Prometheus. docs/routers.md says what to do about it."""

import prometheus_client

from kvferry.cli.router_fleet import Fleet


class Counts:
    """Of one router. Its event loop only."""

    kind = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, **fleets: Fleet):
        self._registry = prometheus_client.CollectorRegistry()
        self._requests = self._counter("requests", "Requests of clients.", "outcome")
        self._prefills = self._counter("prefills", "Requests by what producers said.", "outcome")
        self._retries = self._counter("retries", "Engines that failed a request.", "leg", "reason")
        healthy = prometheus_client.Gauge(
            "kvferry_router_healthy_engines",
            "Engines that get requests.",
            ["role"],
            registry=self._registry,
        )
        for role, fleet in fleets.items():
            healthy.labels(role).set_function(lambda fleet=fleet: fleet.healthy_count)

    def request(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def prefill(self, outcome: str) -> None:
        self._prefills.labels(outcome).inc()

    def retry(self, leg: str, reason: str) -> None:
        self._retries.labels(leg, reason).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return prometheus_client.generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(
            f"kvferry_router_{name}", meaning, labels, registry=self._registry
        )
