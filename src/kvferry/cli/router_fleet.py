"""The engines behind `kvferry route`: which of them are healthy, and whose turn it is.

An engine is asked for its `/health` steadily, less often while it is down. One that fails a request
is asked at once, and gets none until it has answered. Where it stays silent, what waits for it is
given up: a process that stands still breaks no connection.

Everything here runs on one event loop.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import aiohttp

HEALTH_INTERVAL_S = 1.0
BACKOFF_MAX_S = 8.0
LOST_FAILURES = 3
"""Failed health checks in a row after which nobody waits for an engine any longer."""
POLL_S = 0.05

Result = TypeVar("Result")


class LegError(Exception):
    """One engine did not do its part of a request. `reason`: as in the metrics."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(eq=False)
class Engine:
    """One server of vLLM. `url`: without a slash at the end."""

    url: str
    is_healthy: bool = False
    failure_count: int = 0
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    _is_suspected: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for(self, answer: Awaitable[Result]) -> Result:
        """What the engine answers. Raises LegError if it breaks off, or is given up."""
        try:
            async with asyncio.timeout(None) as limit:
                self._waits.add(limit)
                try:
                    return await answer
                finally:
                    self._waits.discard(limit)
        except aiohttp.ClientConnectorError:
            raise LegError("refused") from None
        except aiohttp.ClientError:
            raise LegError("broken") from None
        except TimeoutError:
            raise LegError("lost") from None

    def suspect(self) -> None:
        """It failed a request: no other one before it has answered a health check."""
        self.is_healthy = False
        self._is_suspected.set()

    async def watch(self, session: aiohttp.ClientSession, deadline_s: float) -> None:
        """Checks its health until cancelled. `deadline_s`: for the answer."""
        limit = aiohttp.ClientTimeout(total=deadline_s)
        while True:
            self._is_suspected.clear()
            await self._check(session, limit)
            delay_s = min(HEALTH_INTERVAL_S * 2**self.failure_count, BACKOFF_MAX_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._is_suspected.wait()

    async def _check(self, session: aiohttp.ClientSession, limit: aiohttp.ClientTimeout) -> None:
        try:
            async with session.get(f"{self.url}/health", timeout=limit) as reply:
                self.is_healthy = reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            self.is_healthy = False
        self.failure_count = 0 if self.is_healthy else self.failure_count + 1
        if self.failure_count >= LOST_FAILURES:
            for wait in list(self._waits):
                wait.reschedule(asyncio.get_running_loop().time())


class Fleet:
    """Engines of one role, taken in turn."""

    def __init__(self, urls: Sequence[str]):
        self.engines = [Engine(url) for url in urls]
        self._turns = count()

    @property
    def healthy_count(self) -> int:
        return sum(engine.is_healthy for engine in self.engines)

    def pick(self, failed: Engine | None = None) -> Engine | None:
        """The next healthy engine, or None. `failed`: only if there is no other."""
        healthy = [engine for engine in self.engines if engine.is_healthy]
        others = [engine for engine in healthy if engine is not failed] or healthy
        return others[next(self._turns) % len(others)] if others else None

    async def wait(self, failed: Engine | None, patience_s: float) -> Engine | None:
        """As `pick`, but waits until there is one, for `patience_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while (engine := self.pick(failed)) is None:
                    await asyncio.sleep(POLL_S)
                return engine
        return None
