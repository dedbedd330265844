"""Tells whoever routes requests what this engine has put into the store, and when it is gone.

Life of a chunk's word:

1. PLANNED: the engine stores the chunk; what there is to say of it is kept, since its request will
   be gone when the time comes.
2. SAID: the catalog has its page, so any engine can read it: `take` returns that it is stored.
   A chunk that has no page when its store must have ended was dropped, and is not mentioned.
3. The catalog has it no more: evicted, cleared, or lost with the catalog. `take` returns that it is
   removed. Found out within `REVIEW_S` or so, by asking about all of them in turns.

Of what others have stored nothing is said, though they say it themselves. At most `SAID_MAX` chunks
are remembered: who is forgotten is said to be removed. The scheduler's thread plans and takes; the
runner's asks.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvferry.catalog.base import Catalog
from kvferry.clock import Clock
from kvferry.metrics import Metrics
from kvferry.offload.base import Part, Request
from kvferry.offload.scheduler.lookup import pieces

SAID_MAX = 32_768
REVIEW_MAX = 4096
"""Chunks of each kind that are asked about in one second."""
REVIEW_S = SAID_MAX / REVIEW_MAX


class Words(NamedTuple):
    """What is to be said of a chunk: when it is stored, and when it is removed. The engine's own
    objects, which nobody here looks into."""

    stored: Any
    removed: Any


Describe = Callable[[Request, Part, int], Words | None]
"""Of a request's chunk, by its index; None: nothing is said of it. The scheduler's thread."""


class _Chunk(NamedTuple):
    namespace: bytes
    key: bytes
    words: Words
    until_s: float  # by then its store has ended, one way or the other


class Announcer:
    """See the module. `store_s`: how long a store may take, its commit included."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        metrics: Metrics,
        describe: Describe,
        store_s: float,
        said_max: int = SAID_MAX,
    ):
        self._catalog = catalog
        self._clock = clock
        self._metrics = metrics
        self._describe = describe
        self._store_s = store_s
        self._said_max = said_max
        self._lock = threading.Lock()
        self._planned: dict[bytes, _Chunk] = {}  # by key, as is the next; the oldest first
        self._said: dict[bytes, _Chunk] = {}  # those asked about longest ago first
        self._news: deque[Any] = deque()

    # Scheduler's thread

    def plan(self, request: Request, part: Part, first_chunk: int, keys: Sequence[bytes]) -> None:
        """These chunks of the request are being stored."""
        until_s = self._clock.now_s() + self._store_s
        for index, key in enumerate(keys, first_chunk):
            words = self._describe(request, part, index)
            if words is not None:
                with self._lock:
                    self._planned.pop(key, None)
                    if key not in self._said:
                        self._planned[key] = _Chunk(part.namespace, key, words, until_s)
                    if len(self._planned) > self._said_max:  # nobody has asked for long
                        del self._planned[next(iter(self._planned))]
                        self._metrics.count("kvferry_events_total", outcome="dropped")

    def take(self) -> list[Any]:
        """What there is to say since the last call, in order."""
        if not self._news:
            return []
        with self._lock:
            news, self._news = self._news, deque()
        return list(news)

    def forget(self) -> None:
        """The namespaces are others from now on: nobody reads those pages any more."""
        with self._lock:
            self._planned.clear()
            self._remove(list(self._said.values()))

    # Runner's thread

    def review(self) -> None:
        """Once a second. Raises what the catalog raises, and has not changed anything then."""
        with self._lock:
            planned = _first(self._planned.values())
            said = _first(self._said.values())
        present = self._present([*planned, *said])
        now_s = self._clock.now_s()
        with self._lock:
            found = [c for c in planned if c.key in present and self._planned.pop(c.key, None)]
            late = [c for c in planned if c.until_s <= now_s and self._planned.pop(c.key, None)]
            self._metrics.count("kvferry_events_total", len(late), outcome="dropped")
            self._remove([c for c in said if c.key not in present])
            for chunk in (c for c in said if c.key in self._said):
                self._said[chunk.key] = self._said.pop(chunk.key)  # its turn is over
            for chunk in found:
                self._say(chunk.words.stored, "stored")
                self._said[chunk.key] = chunk
            self._remove(list(self._said.values())[: max(0, len(self._said) - self._said_max)])

    def _present(self, chunks: Sequence[_Chunk]) -> set[bytes]:
        by_namespace: dict[bytes, list[bytes]] = {}
        for chunk in chunks:
            by_namespace.setdefault(chunk.namespace, []).append(chunk.key)
        found: set[bytes] = set()
        for namespace, keys in by_namespace.items():
            for piece in pieces(len(keys), self._clock):
                asked = keys[piece.start : piece.stop]
                answers = self._catalog.present(namespace, asked)
                found.update(key for key, is_there in zip(asked, answers, strict=True) if is_there)
        return found

    # Under the lock

    def _remove(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            if self._said.pop(chunk.key, None):
                self._say(chunk.words.removed, "removed")

    def _say(self, word: Any, outcome: str) -> None:
        self._news.append(word)
        self._metrics.count("kvferry_events_total", outcome=outcome)


def _first(chunks: Iterable[_Chunk]) -> list[_Chunk]:
    return [chunk for chunk, _ in zip(chunks, range(REVIEW_MAX), strict=False)]
