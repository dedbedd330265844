"""The proxy of `kvferry route`: a request is prefilled by a producer and answered by a consumer.

Life of a request:

1. Its body is read, up to a bound. What a client writes about transfers is dropped.
2. A healthy producer gets it with one token to answer, and with the wish to keep the blocks. If
   that fails another producer does; if all fail, or it offers nothing, there is no remote KV.
3. A healthy consumer gets it with what the producer said, and its answer goes to the client. Until
   the first byte of that answer has been sent, an engine that fails is replaced.
4. A client that hangs up cancels whichever of these is under way: the engine aborts.

With `meetings` 2 and 3 happen at once, if the producer is known: it is the consumer's to find out
what becomes of the prefill. One that is still under way when the answer is complete is cancelled.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.cli.router_counts import Counts
from kvferry.cli.router_fleet import Engine, Fleet, LegError
from kvferry.cli.router_meetings import Meetings

PATHS = ("/v1/completions", "/v1/chat/completions")
TRIES_MAX = 3
"""Engines of a role that one request may be given to: it may be what kills them."""
CONNECT_DEADLINE_S = 5.0
BODY_DEADLINE_S = 30.0
CARRIED = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
TRANSFER = "kv_transfer_params"
ONE_TOKEN = {"max_tokens": 1, "stream": False, "n": 1}
WANTED = {"do_remote_decode": True}
NOT_OF_A_PREFILL = (
    *("stream_options", "min_tokens", "best_of", "echo"),
    *("logprobs", "top_logprobs", "prompt_logprobs"),
)
ABORTED = b'"finish_reason":"abort"'
"""How vLLM answers, with code 200, what it was computing when it was told to end. No text can
contain it: its quotes would be escaped."""
STREAM_END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Limits:
    """`patience_s`: how long a request waits for a healthy consumer; `health_deadline_s`: how
    long an engine may take to say that it is healthy."""

    body_bytes_max: int
    patience_s: float
    health_deadline_s: float


class Router:
    """Starts with its application, and ends with it."""

    def __init__(
        self,
        producers: Sequence[str],
        consumers: Sequence[str],
        limits: Limits,
        meetings: Meetings | None = None,
    ):
        self._producers = Fleet(producers)
        self._consumers = Fleet(consumers)
        self._limits = limits
        self._meetings = meetings
        self._counts = Counts(producer=self._producers, consumer=self._consumers)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        application = web.Application(client_max_size=self._limits.body_bytes_max)
        application.cleanup_ctx.append(self._run)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/v1/models", self._models)
        for path in PATHS:
            application.router.add_post(path, self._complete)
        return application

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        # A connection that is kept may be one that an engine is just closing.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as self._session:
            engines = self._producers.engines + self._consumers.engines
            deadline_s = self._limits.health_deadline_s
            watches = [
                asyncio.create_task(engine.watch(self._session, deadline_s)) for engine in engines
            ]
            yield
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._consumers.healthy_count else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._counts.text(), headers={"Content-Type": self._counts.kind})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._from_a_consumer(request, None)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            wanted = await _read(request)
            if not _is_one_prompt(wanted):
                self._counts.prefill("several")
                return await self._from_a_consumer(request, json.dumps(wanted).encode())
            producer = self._producers.pick()
            if meeting := self._meeting(producer):
                return await self._at_once(request, wanted, producer, meeting)
            offer = await self._prefill(request, wanted, producer)
            decode = wanted if offer is None else wanted | {TRANSFER: offer}
            return await self._from_a_consumer(request, json.dumps(decode).encode())
        except web.HTTPException as refusal:
            self._counts.request("refused")
            return _error(refusal.status, refusal.text or refusal.reason)
        except RecursionError:
            self._counts.request("refused")
            return _error(400, "the body is nested too deeply")
        except (asyncio.CancelledError, ConnectionResetError):
            self._counts.request("abandoned")
            raise

    def _meeting(self, producer: Engine | None) -> tuple[dict, dict] | None:
        if self._meetings is None or producer is None:
            return None
        return self._meetings.appoint(producer)

    async def _at_once(
        self, request: web.Request, wanted: dict[str, Any], producer: Engine, meeting: tuple
    ) -> web.StreamResponse:
        """Both engines are asked. `meeting`: what each of them gets."""
        there, here = meeting
        body = _prefill_body(wanted, there)
        prefill = asyncio.create_task(self._ask(producer, request, body))
        try:
            decode = json.dumps(wanted | {TRANSFER: here}).encode()
            return await self._from_a_consumer(request, decode)
        finally:
            outcome = "met" if prefill.done() else "cancelled"
            prefill.cancel()
            (ended,) = await asyncio.gather(prefill, return_exceptions=True)
            self._counts.prefill("no_producer" if isinstance(ended, LegError) else outcome)

    async def _prefill(
        self, request: web.Request, wanted: dict[str, Any], engine: Engine | None
    ) -> Any:
        """What a producer offers, `engine` if it can; None if there is no remote KV."""
        body = _prefill_body(wanted, WANTED)
        for _ in range(TRIES_MAX):
            if engine is None:
                break
            try:
                offer = await self._ask(engine, request, body)
            except LegError:
                engine = self._producers.pick(engine)
            else:
                self._counts.prefill("offered" if offer else "nothing")
                return offer
        return self._counts.prefill("no_producer")

    async def _ask(self, engine: Engine, request: web.Request, body: bytes) -> Any:
        """What one producer offers. Raises LegError."""
        try:
            async with await self._send(engine, request, body) as reply:
                answer = await engine.wait_for(reply.read())
        except LegError as failed:
            engine.suspect()
            self._counts.retry("prefill", failed.reason)
            if self._meetings is not None:
                self._meetings.forget(engine)
            raise
        offer = _offer(answer) if reply.status == 200 else None
        if self._meetings is not None:
            self._meetings.learn(engine, offer)
        return offer

    async def _from_a_consumer(
        self, request: web.Request, body: bytes | None
    ) -> web.StreamResponse:
        engine = None
        for _ in range(TRIES_MAX):
            engine = await self._consumers.wait(engine, self._limits.patience_s)
            if engine is None:
                self._counts.request("failed")
                return _error(503, "no healthy consumer")
            try:
                async with await self._send(engine, request, body) as reply:
                    if reply.content_type == "text/event-stream":
                        return await self._stream(request, engine, reply)
                    return await self._whole(engine, reply)
            except LegError as failed:
                engine.suspect()
                self._counts.retry("decode", failed.reason)
        self._counts.request("failed")
        return _error(502, f"{TRIES_MAX} engines failed, one after the other")

    async def _send(
        self, engine: Engine, request: web.Request, body: bytes | None
    ) -> aiohttp.ClientResponse:
        headers = {name: request.headers[name] for name in CARRIED if name in request.headers}
        headers |= {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        url = engine.url + request.path
        sent = self._session.request(request.method, url, data=body, headers=headers)
        reply = await engine.wait_for(sent)
        if reply.status >= 500:
            reply.close()
            raise LegError("error")
        return reply

    async def _whole(self, engine: Engine, reply: aiohttp.ClientResponse) -> web.Response:
        body = await engine.wait_for(reply.read())
        if ABORTED in body:
            raise LegError("aborted")
        self._counts.request("answered" if reply.status < 400 else "refused")
        return web.Response(status=reply.status, body=body, headers=_kept_headers(reply))

    async def _stream(
        self, request: web.Request, engine: Engine, reply: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Raises LegError while nothing has been sent; afterwards the stream ends with an error."""
        response, outcome = web.StreamResponse(headers=_kept_headers(reply)), "answered"
        try:
            async for events in _whole_events(engine, reply):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(events)
        except LegError as failed:
            if not response.prepared:
                raise
            engine.suspect()
            outcome = "cut"
            text = _error_text(502, f"the engine failed: {failed.reason}")
            await response.write(f"data: {text}\n\n".encode())
        await response.write_eof()
        self._counts.request(outcome)
        return response


async def _whole_events(engine: Engine, reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """A stream's bytes, cut between events. Raises LegError where it ends before its end."""
    rest, last = b"", b""
    while received := await engine.wait_for(reply.content.readany()):
        events, separator, rest = (rest + received).rpartition(b"\n\n")
        if not separator:
            continue
        last = events + separator
        if ABORTED in last:
            raise LegError("aborted")
        if _is_fault(last):
            raise LegError("error")
        yield last
    if rest or not last.endswith(STREAM_END):
        raise LegError("broken")


def _is_fault(events: bytes) -> bool:
    """Whether vLLM ends the stream with an error of its own: a client's have smaller codes."""
    if not events.startswith(b'data: {"error"'):
        return False
    try:
        return json.loads(events.split(b"\n\n")[0][len("data: ") :])["error"]["code"] >= 500
    except (ValueError, KeyError, TypeError):
        return True


async def _read(request: web.Request) -> dict[str, Any]:
    """What a client wants, without what it says of transfers. Raises web.HTTPException."""
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            wanted = json.loads(await request.read())
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (ValueError, web.RequestPayloadError):
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(wanted, dict):
        raise web.HTTPBadRequest(text="the body is not a JSON object")
    wanted.pop(TRANSFER, None)
    if isinstance(extra := wanted.get("vllm_xargs"), dict):
        extra.pop(TRANSFER, None)  # vLLM would take them from there as well
    return wanted


def _is_one_prompt(wanted: Mapping[str, Any]) -> bool:
    """What several prompts in one request get is not told apart: parameters are of one."""
    prompt = wanted.get("prompt")
    is_batch = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    return not is_batch and not wanted.get("use_beam_search")


def _prefill_body(wanted: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    kept = {name: value for name, value in wanted.items() if name not in NOT_OF_A_PREFILL}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    return json.dumps(kept | ONE_TOKEN | {TRANSFER: params}).encode()


def _offer(answer: bytes) -> Any:
    try:
        return json.loads(answer).get(TRANSFER) or None
    except (ValueError, AttributeError, RecursionError):
        return None


def _kept_headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    names = ("Content-Type", "X-Request-Id")
    return {name: reply.headers[name] for name in names if name in reply.headers}


def _error(status: int, message: str) -> web.Response:
    text = _error_text(status, message)
    return web.Response(status=status, text=text, content_type="application/json")


def _error_text(status: int, message: str) -> str:
    """As vLLM and OpenAI say it."""
    return json.dumps({"error": {"message": message, "type": "kvferry route", "code": status}})
