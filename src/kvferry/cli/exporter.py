"""`kvferry exporter`: Prometheus metrics of a store, from its catalog."""

from types import ModuleType
from typing import Annotated

import typer

from kvferry.cli import options, output
from kvferry.cli.view.sampler import Sampler
from kvferry.cli.view.store import StoreWatch
from kvferry.clock import SystemClock
from kvferry.config import view_token
from kvferry.errors import ConfigError


def exporter(
    pages: options.Pages,
    catalog: options.CatalogUrl = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 9731,
    token_file: options.TokenFile = None,
    interval_s: Annotated[
        float, typer.Option(min=0.1, max=600, help="How often to look at the catalog.")
    ] = 5.0,
) -> None:
    """Serve /metrics of a store for Prometheus, until Ctrl-C: capacity, pages and hit rate by
    namespace, evictions, leases, engines. What only engines know they show themselves, on the
    page /metrics of vLLM. Beyond loopback it asks for a token."""
    server = view_server()
    from kvferry.cli.view import figures  # noqa: PLC0415 - needs what the server needs

    clock = SystemClock()
    watch = StoreWatch(options.store_config(pages, catalog), clock)
    listening = server.Listening(host, port, view_token(token_file))
    bound = server.bind(listening)
    sampler = Sampler(watch.look, interval_s, clock, _tell)
    refusals = server.Refusals()
    metrics = figures.Figures(sampler, refusals)
    sampler.start()
    try:
        server.serve(
            bound,
            listening.token,
            {"/metrics": server.Page(metrics.text, figures.KIND)},
            refusals,
            lambda: output.complain(f"metrics: {server.address(bound)}metrics"),
        )
    finally:
        sampler.close()


def view_server() -> ModuleType:
    """The module `view.server`. Raises ConfigError if what it stands on is not installed."""
    try:
        from kvferry.cli.view import server  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigError(
            "view.server", f"{error.name} is missing: pip install kvferry[dashboard]"
        ) from error
    return server


def _tell(error: str | None) -> None:
    output.complain(f"store: {error or 'answers'}")
