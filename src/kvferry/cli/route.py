"""`kvferry route`: clients on one side, producers and consumers on the other."""

from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvferry.cli import output
from kvferry.clock import SystemClock
from kvferry.config import SECRET_VARIABLE, transfer_secret
from kvferry.errors import ConfigError
from kvferry.setting_values import parse_size

Urls = list[str]


def route(
    producer: Annotated[Urls, typer.Option(metavar="URL", help="Prefills; may be repeated.")],
    consumer: Annotated[Urls, typer.Option(metavar="URL", help="Answers; may be repeated.")],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    body: Annotated[str, typer.Option(help="The longest request.")] = "16MiB",
    patience_s: Annotated[
        float, typer.Option(min=0, help="How long a request waits for a healthy consumer.")
    ] = 10.0,
    health_deadline_s: Annotated[
        float, typer.Option(min=0.1, help="How long an engine may take to say that it is healthy.")
    ] = 5.0,
    drain_s: Annotated[
        float, typer.Option(min=0, help="After SIGTERM: for requests under way.")
    ] = 60.0,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="Ask a producer and a consumer at once: for engines whose `direction` is `push`.",
        ),
    ] = False,
    secret_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=f"With --push: the engines' secret. Default: the variable {SECRET_VARIABLE}.",
        ),
    ] = None,
) -> None:
    """A proxy in front of vLLM servers, for tests and small set-ups: what an engine that dies was
    computing goes to another one. In production use a router that knows load and prefixes, such as
    vllm-router: docs/routers.md. It asks nobody who he is: listen beyond loopback only where all
    who can reach it may."""
    try:
        from aiohttp import web  # noqa: PLC0415 - optional

        from kvferry.cli.router import Limits, Router  # noqa: PLC0415 - needs it
        from kvferry.cli.router_meetings import Meetings  # noqa: PLC0415 - needs it
    except ImportError:
        raise ConfigError(
            "route.aiohttp", "aiohttp is missing: pip install kvferry[route]"
        ) from None
    producers, consumers = map(_engine_urls, (producer, consumer))
    limits = Limits(parse_size("--body", body), patience_s, health_deadline_s)
    meetings = Meetings(_secret(secret_file), SystemClock()) if push else None
    router = Router(producers, consumers, limits, meetings)
    output.complain(f"{host}:{port}: {len(producers)} producers, {len(consumers)} consumers")
    try:
        web.run_app(
            router.application(),
            host=host,
            port=port,
            shutdown_timeout=drain_s,
            handler_cancellation=True,
            access_log=None,
            print=None,
        )
    except OSError as error:
        raise ConfigError("route.bind", f"--host, --port: {error}") from None


def _secret(secret_file: str | None) -> bytes:
    secret = transfer_secret(secret_file)
    if not secret:
        raise ConfigError(
            "route.secret",
            f"--push needs the secret that the engines share: set {SECRET_VARIABLE} or"
            " --secret-file",
        )
    return secret


def _engine_urls(urls: Urls) -> Urls:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("route.url", f"such as http://10.0.0.1:8100, and not {url!r}")
    return [url.rstrip("/") for url in urls]
