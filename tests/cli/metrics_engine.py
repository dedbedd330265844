"""The page of metrics of an engine, as vLLM shows it, without an engine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client

from kvferry.metric_table import METRICS
from kvferry.metrics import Exporter, Metrics

NAMES = {
    name: f"vllm:{name}"
    for name in METRICS
    if not name.startswith(("kvferry_transfer_", "kvferry_exporter_"))
}


class MetricsEngine:
    """`metrics`: what it counts. `content`: served in place of its page, if set."""

    def __init__(self, model):
        self.metrics, self.content = Metrics(), None
        self._model = model
        self._registry = prometheus_client.CollectorRegistry()
        self._exporter = Exporter(
            *map(
                self._in_registry,
                (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram),
            ),
            ["model_name", "engine"],
            NAMES,
        )
        for name in ("load_bytes", "store_bytes", "lookup_tokens", "hit_tokens"):
            self.metrics.count(f"kvferry_{name}_total", 0)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.name = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.name}/metrics"

    def _in_registry(self, kind):
        return lambda **arguments: kind(**arguments, registry=self._registry)

    def _page(self):
        self._exporter.observe(self.metrics.drain(), [self._model, "0"])
        return prometheus_client.generate_latest(self._registry)

    def _handler(engine):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = engine._page() if engine.content is None else engine.content
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        return Handler

    def close(self):
        self._server.shutdown()
        self._server.server_close()
