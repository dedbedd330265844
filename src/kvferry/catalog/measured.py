"""A catalog whose calls are timed and whose failures are counted, by verb.

A wrapper, so that no catalog measures itself and each is measured alike.
"""

from collections.abc import Callable
from typing import Any

from kvferry.catalog.base import Catalog
from kvferry.clock import Clock
from kvferry.errors import Error
from kvferry.metric_table import CATALOG_VERBS
from kvferry.metrics import Metrics


class MeasuredCatalog:
    """Has all that `inner` has. Threads as for `inner`."""

    def __init__(self, inner: Catalog, clock: Clock, metrics: Metrics):
        self._inner = inner
        self._clock = clock
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._measured(name, found) if name in CATALOG_VERBS else found

    def _measured(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **named: Any) -> Any:
            start_s = self._clock.now_s()
            try:
                return call(*arguments, **named)
            except (Error, OSError):
                self._metrics.count("kvferry_catalog_errors_total", verb=verb)
                raise
            finally:
                taken_s = self._clock.now_s() - start_s
                self._metrics.observe("kvferry_catalog_call_seconds", taken_s, verb=verb)

        return measured
