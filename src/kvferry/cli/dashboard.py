"""`kvferry dashboard`: one page that says how a store and its engines are."""

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from kvferry.cli import options, output
from kvferry.cli.exporter import view_server
from kvferry.cli.view.engines import EngineWatch
from kvferry.cli.view.sampler import Sampler
from kvferry.cli.view.state import Engine, State
from kvferry.cli.view.store import StoreWatch
from kvferry.clock import SystemClock
from kvferry.config import view_token

FOLDER = Path(__file__).parent / "view" / "page"
PREFIX_PAGES = 512
"""Read of each namespace at each look: 2 to 3 ms of a Valkey server's time."""
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def dashboard(
    pages: options.Pages,
    catalog: options.CatalogUrl = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="An engine's page of metrics, such as http://10.0.0.1:8000/metrics; may be"
            " repeated.",
        ),
    ] = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 9732,
    token_file: options.TokenFile = None,
    interval_s: Annotated[float, typer.Option(min=0.1, max=600, help="How often to look.")] = 5.0,
) -> None:
    """Serve a status page of a store, until Ctrl-C: what is wrong and what to do, capacity, hit
    rate, bandwidth, drops, evictions, leases, breakers, the hottest prefixes. What only engines
    know is read from their own metrics. Beyond loopback it asks for a token."""
    server = view_server()
    clock = SystemClock()
    watch = StoreWatch(options.store_config(pages, catalog), clock, PREFIX_PAGES)
    watches = [EngineWatch(url) for url in engine or ()]
    listening = server.Listening(host, port, view_token(token_file))
    bound = server.bind(listening)
    store = Sampler(watch.look, interval_s, clock)
    engines = [Engine(one, Sampler(one.look, interval_s, clock)) for one in watches]
    refusals = server.Refusals()
    state = State(store, engines, refusals, clock, interval_s)
    made = Sampler(state.text, min(interval_s, 1.0), clock)
    samplers = [store, *(one.sampler for one in engines), made]
    for sampler in samplers:
        sampler.start()
    address = server.address(bound)
    said = f"status page: {address}{'#token=...' if listening.token else ''}"
    try:
        shown = _pages(server, lambda: made.latest().value or b"{}")
        server.serve(bound, listening.token, shown, refusals, lambda: output.complain(said))
    finally:
        for sampler in samplers:
            sampler.close()


def _pages(server: ModuleType, state) -> dict:
    """What is answered where. The page itself says nothing of the store and needs no token."""
    pages = {"/state.json": server.Page(state, "application/json")}
    for name in ("index.html", "page.css", "page.js"):
        content = (FOLDER / name).read_bytes()
        path = "/" if name == "index.html" else f"/{name}"
        pages[path] = server.Page(
            lambda content=content: content,
            KINDS[Path(name).suffix],
            is_open=True,
            headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"},
        )
    return pages
