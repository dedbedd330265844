"""What only engines know, from the page /metrics of each: bandwidth, drops, breaker."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvferry.errors import ConfigError, UnavailableError
from kvferry.server_url import shown

DEADLINE_S = 4.0
PAGE_BYTES_MAX = 16 << 20
PREFIX = "vllm:kvferry_"

SUMS = (
    "load_bytes_total",
    "store_bytes_total",
    "lookup_tokens_total",
    "hit_tokens_total",
    "loaded_tokens_total",
)
"""Counters that are shown, without their prefix; the next two: by reason; gauges."""
REASONS = ("store_drops_total", "load_failures_total", "loads_declined_total")
GAUGES = ("breaker_open", "standing_aside", "loads_pending", "stores_pending")


class EngineLook(msgspec.Struct, frozen=True):
    """`sums` and `gauges` by the names above, all that the engine shows; `reasons`: by name, then
    by reason. Empty where the engine runs without kvferry."""

    model: str
    sums: dict[str, float]
    gauges: dict[str, float]
    reasons: dict[str, dict[str, float]]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An engine's page is where the operator says, or nowhere."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


class EngineWatch:
    """Reads one engine's page. One thread: a sampler's. Raises ConfigError for an URL that cannot
    be one."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "view.engine", f"--engine: such as http://10.0.0.1:8000/metrics, not {shown(url)!r}"
            )
        self.url = url if parts.path.strip("/") else url.rstrip("/") + "/metrics"

    @property
    def name(self) -> str:
        """For people."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def look(self) -> EngineLook:
        """Raises UnavailableError if there is no such page."""
        try:
            with _OPENER.open(self.url, timeout=DEADLINE_S) as reply:
                page = reply.read(PAGE_BYTES_MAX)
        except urllib.error.HTTPError as error:
            raise UnavailableError("view.engine", f"answers {error.code}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            reason = getattr(cause, "strerror", None) or cause
            raise UnavailableError("view.engine", f"does not answer: {reason}") from error
        try:
            return read_page(page.decode(errors="replace").splitlines())
        except (ValueError, KeyError, IndexError) as error:
            raise UnavailableError("view.engine", "its page is not Prometheus's") from error


def read_page(lines: Iterable[str]) -> EngineLook:
    """Of all engines behind one page together. Raises ValueError, KeyError
    or IndexError if it is no such page."""
    sums: dict[str, float] = {}
    gauges: dict[str, float] = {}
    reasons: dict[str, dict[str, float]] = {name: {} for name in REASONS}
    model = ""
    ours = [line for line in lines if line.startswith(PREFIX)]  # comments and others' left out
    for family in text_string_to_metric_families("\n".join(ours) + "\n"):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            model = model or sample.labels.get("model_name", "")
            if name in SUMS:
                sums[name] = sums.get(name, 0.0) + sample.value
            elif name in GAUGES:
                gauges[name] = max(gauges.get(name, 0.0), sample.value)
            elif name in REASONS:
                reason = sample.labels.get("reason", "")
                of_name = reasons[name]
                of_name[reason] = of_name.get(reason, 0.0) + sample.value
    return EngineLook(model, sums, gauges, reasons)
