"""A cache of prefixes over a trace, in memory: the catalog's policies on indexes made for speed.

Which page goes, what is remembered of it and what is learned is `catalog.eviction`'s own code;
ages, uses and the order of verbs are the catalog's: a request looks its chunks up, touches what it
hits, and publishes the rest. Tests hold it against a catalog that is told the same.
"""

import hashlib
import json
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from kvferry.catalog.base import AGE_STEP_S, CLASS_COUNT, Policy
from kvferry.catalog.eviction import (
    Head,
    Recall,
    bucket_of,
    more_uses,
    remembered,
    returned,
    use_class,
    victim,
)
from kvferry.layout import Address

TRACE_CHUNK_TOKENS = 512


class Request(NamedTuple):
    """`chunks`: ids of its full chunks; equal ids have equal prefixes."""

    at_s: float
    chunks: Sequence[int]


def read_trace(path: Path) -> list[Request]:
    """A trace of the Mooncake project, without chunks that are not full: kvferry stores none."""
    requests = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        chunks = row["hash_ids"][: row["input_length"] // TRACE_CHUNK_TOKENS]
        requests.append(Request(row["timestamp"] / 1000, chunks))
    return requests


def key_of(chunk: int) -> bytes:
    return hashlib.sha256(chunk.to_bytes(8, "little")).digest()


class _Page:
    __slots__ = ("age", "index", "slot", "uses")

    def __init__(self, age: int, index: int, uses: int, slot: int):
        self.age, self.index, self.uses, self.slot = age, index, uses, slot


class PrefixCache:
    """`slot_count`: pages that fit. `recall`: what it has learned."""

    def __init__(self, slot_count: int, policy: Policy):
        self.recall = Recall()
        self.pages: dict[int, _Page] = {}
        self._slot_count = slot_count
        self._policy = policy
        self._chunks: list[int] = []  # by slot
        self._cold: list[list[tuple[int, int, int]]] = [[] for _ in range(CLASS_COUNT)]
        self._ghosts: dict[int, bytes] = {}

    def ask(self, request: Request) -> int:
        """Serves a request. Returns how many chunks from its start on were there."""
        age, chunks = int(request.at_s // AGE_STEP_S), request.chunks
        hit_count = 0
        while hit_count < len(chunks) and chunks[hit_count] in self.pages:
            hit_count += 1
        for chunk in chunks[:hit_count]:
            page = self.pages[chunk]
            if page.age < age:
                self._set(chunk, _Page(age, page.index, more_uses(page.uses), page.slot))
        for index in range(hit_count, len(chunks)):
            if chunks[index] not in self.pages:
                self._publish(chunks, index, age)
        return hit_count

    def _publish(self, chunks: Sequence[int], index: int, age: int) -> None:
        if len(self.pages) == self._slot_count:
            slot = self._evict(age)
            self._chunks[slot] = chunks[index]
        else:
            slot = len(self._chunks)
            self._chunks.append(chunks[index])
        uses = more_uses(self._returned(chunks[index]))
        self._set(chunks[index], _Page(age, index, uses, slot))
        while index > 0:  # as the catalog lifts ancestors
            index -= 1
            parent = self.pages.get(chunks[index])
            if parent is None or (parent.age == age and parent.uses >= uses):
                return
            uses = max(uses, parent.uses)
            self._set(chunks[index], _Page(age, index, uses, parent.slot))

    def _set(self, chunk: int, page: _Page) -> None:
        self.pages[chunk] = page
        heappush(self._cold[use_class(page.uses)], (page.age, -page.index, page.slot))

    def _evict(self, age: int) -> int:
        """Returns the slot that is free now."""
        heads = [self._head(use) for use in range(CLASS_COUNT)]
        head = victim(self._policy, heads, age, self.recall.reach)
        chunk = self._chunks[head.address.slot]
        uses = self.pages.pop(chunk).uses
        if self._policy is Policy.ADAPTIVE:
            key = key_of(chunk)
            place = bucket_of(key, self._slot_count)
            bucket = self._ghosts.get(place, b"")
            self.recall, self._ghosts[place] = remembered(self.recall, bucket, key, uses)
        return head.address.slot

    def _head(self, use: int) -> Head | None:
        cold = self._cold[use]
        while cold:
            age, index, slot = cold[0]
            page = self.pages[self._chunks[slot]]
            if (page.age, -page.index, use_class(page.uses)) == (age, index, use):
                return Head(age, page.index, Address(0, slot))
            heappop(cold)
        return None

    def _returned(self, chunk: int) -> int:
        if not self._ghosts:
            return 0
        key = key_of(chunk)
        place = bucket_of(key, self._slot_count)
        bucket = self._ghosts.get(place, b"")
        self.recall, self._ghosts[place], uses = returned(
            self.recall, bucket, key, self._slot_count
        )
        return uses


def replay(requests: Sequence[Request], slot_count: int, policy: Policy) -> int:
    """Chunks of the trace that were there when they were asked for, from the start of a prompt."""
    cache = PrefixCache(slot_count, policy)
    return sum(cache.ask(request) for request in requests)


def optimum(requests: Sequence[Request], slot_count: int) -> int:
    """The hits of one who knows the future: what is used latest goes, or does not come in."""
    asked = [chunk for request in requests for chunk in request.chunks]
    never = len(asked)
    next_use, seen = [never] * never, {}
    for at in range(never - 1, -1, -1):
        next_use[at] = seen.get(asked[at], never)
        seen[asked[at]] = at
    held: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hit_count = 0
    for chunk, use in zip(asked, next_use, strict=True):
        hit_count += held.pop(chunk, None) is not None
        if use == never:
            continue
        if len(held) == slot_count:
            while held.get(latest[0][1]) != -latest[0][0]:
                heappop(latest)
            if -latest[0][0] <= use:
                continue
            del held[heappop(latest)[1]]
        held[chunk] = use
        heappush(latest, (-use, chunk))
    return hit_count
