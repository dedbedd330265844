"""A small HTTP server for operators: pages that are ready, for whoever may see them.

What is not a request for one of its pages, under an allowed name and with the token where one is
asked, is refused and counted. A connection lives for a bounded time and there is a bounded number
of them, so nobody keeps the others out for long.
"""

import asyncio
import hmac
import signal
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.errors import ConfigError
from kvferry.server_url import is_loopback

CONNECTIONS_MAX = 64
CONNECTION_S = 30.0
"""For how long a connection is kept, whatever it does: all answers are short."""
TOKEN_BYTES_MIN = 16
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

Refusals = Counter
"""What was refused, by the reasons of `kvferry_exporter_requests_refused_total`."""


@dataclass(frozen=True)
class Page:
    """What a path answers. `body`: makes it, without waiting. `is_open`: needs no token."""

    body: Callable[[], bytes]
    kind: str
    is_open: bool = False
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Listening:
    """Where to listen, and what to ask for. `token` empty: nothing; then only on loopback."""

    host: str
    port: int
    token: bytes

    def check(self) -> None:
        """Raises ConfigError where strangers could look."""
        if self.token and len(self.token) < TOKEN_BYTES_MIN:
            raise ConfigError("view.token", f"the token has less than {TOKEN_BYTES_MIN} bytes")
        if not self.token and not is_loopback(self.host):
            raise ConfigError(
                "view.token",
                f"{self.host} can be reached from other hosts: it needs a token, of"
                f" {TOKEN_BYTES_MIN} bytes or more, in KVFERRY_VIEW_TOKEN or --token-file",
            )


def bind(listening: Listening) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    listening.check()
    try:
        family = socket.getaddrinfo(listening.host, listening.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((listening.host, listening.port), family=family)
    except OSError as error:
        raise ConfigError("view.bind", f"--host, --port: {error}") from None


def address(bound: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def serve(
    bound: socket.socket,
    token: bytes,
    pages: Mapping[str, Page],
    refusals: Refusals,
    announce: Callable[[], None],
) -> None:
    """Answers until SIGINT or SIGTERM; from `announce` on these end it in order. The main
    thread's."""
    routes = [Route(path, partial(_answer, page)) for path, page in pages.items()]
    open_paths = [path for path, page in pages.items() if page.is_open]
    application = _Gate(Starlette(routes=routes), token, open_paths, refusals)
    server = _Server(
        uvicorn.Config(
            application,
            http=partial(_Connection, refusals=refusals),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    announce()
    server.run(sockets=[bound])


async def _answer(page: Page, request: Request) -> Response:
    return Response(page.body(), media_type=page.kind, headers={**HEADERS, **(page.headers or {})})


class _Server(uvicorn.Server):
    """Signals are `serve`'s."""

    def capture_signals(self) -> Any:
        return nullcontext()


class _Gate:
    """Who may see what; counts what is refused."""

    def __init__(self, inner: Any, token: bytes, open_paths: Sequence[str], refusals: Refusals):
        self._inner = inner
        self._token = token
        self._open_paths = open_paths
        self._refusals = refusals

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if not self._token and not _is_own_name(headers.get(b"host", b"")):
            await self._refuse("host", 421, "Name this host as loopback.", scope, receive, send)
        elif scope["path"] not in self._open_paths and not self._is_known(headers):
            await self._refuse("token", 401, "A token is needed.", scope, receive, send)
        else:
            await self._inner(scope, receive, partial(self._send, send))

    def _is_known(self, headers: Mapping[bytes, bytes]) -> bool:
        kind, _, said = headers.get(b"authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(said.strip(), self._token)
        return not self._token or (kind.lower() == b"bearer" and is_right)

    async def _refuse(self, reason: str, status: int, text: str, *asgi: Any) -> None:
        self._refusals[reason] += 1
        challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        await PlainTextResponse(text + "\n", status, headers=HEADERS | challenge)(*asgi)

    async def _send(self, send: Any, message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] in (404, 405):
            self._refusals["unknown"] += 1
        await send(message)


def _is_own_name(host: bytes) -> bool:
    """Whether a browser of this host asks for this host: a page from elsewhere that made its own
    name point here says that name."""
    name = host.decode("latin-1")
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return is_loopback(name.lower())


class _Connection(H11Protocol):
    """Bounded in number and time."""

    def __init__(self, *arguments: Any, refusals: Refusals, **named: Any):
        super().__init__(*arguments, **named)
        self._refusals = refusals
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._refusals["busy"] += 1
            transport.abort()
        else:
            self._end = self.loop.call_later(CONNECTION_S, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refusals["malformed"] += 1
        super().send_400_response(msg)

    def _expire(self) -> None:
        if self.cycle is None:
            self._refusals["slow"] += 1
        self.transport.abort()
