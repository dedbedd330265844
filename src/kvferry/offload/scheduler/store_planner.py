"""Which chunks a step completes and stores. One thread: the scheduler's.

A chunk is planned in the step whose forward completes it, or soon after: its tokens are known and
accepted, its blocks final after that forward. Where no slot is at hand it is planned in a later
step as long as the request owns the blocks. Not stored: what the catalog has, and what another
request stores already. The caller keeps out requests of foreign origin.
"""

from collections.abc import Sequence

from kvferry.keys import DIGEST_BYTES
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Part, Request, Span, Store, Tables
from kvferry.offload.chunks import NULL_BLOCK
from kvferry.offload.scheduler.announcer import Announcer
from kvferry.offload.scheduler.lookup import Hasher, chunk_keys, rows
from kvferry.offload.scheduler.quarantine import Quarantine
from kvferry.offload.scheduler.record import Chain, Record
from kvferry.offload.space.room import SlotPool

RECENT_KEYS_MAX = 65536
"""Keys planned lately: until `store_s` has passed, when the store has ended one way or the other,
another request with the same prefix does not store them again."""


class StorePlanner:
    """`store_s`: how long a store may take: slots with less of their lease left are not used."""

    def __init__(
        self,
        hasher: Hasher,
        metrics: Metrics,
        quarantine: Quarantine,
        store_s: float,
        announcer: Announcer | None = None,
    ):
        self._hasher = hasher
        self._metrics = metrics
        self._quarantine = quarantine
        self._store_s = store_s
        self._announcer = announcer
        self._parts: tuple[Part, ...] = ()
        self._recent: dict[bytes, float] = {}  # oldest first
        self.pools: list[SlotPool] = []

    def use(self, parts: tuple[Part, ...]) -> None:
        """Starts anew with these parts. The caller has drained the pools."""
        self._parts = parts
        self._recent.clear()
        self.pools = [SlotPool() for _ in parts]

    def forget(self, key: bytes) -> None:
        """The page of this key has turned out bad: it may be stored again."""
        self._recent.pop(key, None)

    def count_missed(self, record: Record, end_tokens: int, now_s: float) -> None:
        """What was complete at the request's end and had no slot."""
        for part, chain in zip(self._parts, record.chains, strict=False):
            full = min(end_tokens // part.chunk_tokens, len(chain.keys))
            missed = [
                index
                for index in range(chain.next_store, full)
                if not self._needs_none(chain, index, chain.keys[index], now_s)
            ]
            if missed:
                self._metrics.count("kvferry_store_drops_total", len(missed), reason="no_slot")

    def plan(self, record: Record, tables: Tables, end_tokens: int, now_s: float) -> list[Store]:
        """Stores for the chunks of `record` that are complete at `end_tokens`."""
        stores: list[Store] = []
        boundaries = []
        for index, chain in enumerate(record.chains):
            part = self._parts[index]
            full = end_tokens // part.chunk_tokens
            if full > chain.next_store:
                if full > len(chain.keys):
                    self._extend_keys(record.request, part, chain, full)
                planned = self._plan_part(chain, index, full, tables[part.group_index], now_s)
                stores += planned
                if planned and self._announcer is not None:
                    self._announce(record.request, part, chain, planned)
            boundaries.append((chain.next_store + 1) * part.chunk_tokens)
        record.next_boundary = min(boundaries, default=0)  # without: the prompt is not hashed yet
        return stores

    def _announce(
        self, request: Request, part: Part, chain: Chain, planned: Sequence[Store]
    ) -> None:
        for span in (store.span for store in planned):
            keys = chain.keys[span.first_chunk : span.first_chunk + len(span)]
            self._announcer.plan(request, part, span.first_chunk, keys)

    def _extend_keys(self, request: Request, part: Part, chain: Chain, full: int) -> None:
        known = len(chain.keys)
        parent = chain.parent(known)
        packed = chunk_keys(self._hasher, part, request, parent, known, full)
        chain.keys += rows(packed, DIGEST_BYTES)

    def _plan_part(
        self, chain: Chain, index: int, full: int, table: Sequence[int], now_s: float
    ) -> list[Store]:
        part, stores = self._parts[index], []
        width = part.chunk_tokens // part.block_tokens
        while (first := chain.next_store) < full:
            keys = self._to_store(chain, first, full, now_s)
            if not keys:
                chain.next_store = first + 1
                continue
            blocks = tuple(table[first * width : (first + len(keys)) * width])
            if NULL_BLOCK in blocks:
                blocks = blocks[: blocks.index(NULL_BLOCK)]
            if len(blocks) < width:  # a window has moved on
                self._metrics.count("kvferry_store_drops_total", reason="fenced")
                chain.next_store = first + 1
                continue
            taken = self.pools[index].take(len(blocks) // width, now_s + self._store_s)
            if taken is None:
                break
            slots, until_s = taken
            count = len(slots) // SLOT.size
            chain.next_store = first + count
            keys, blocks = keys[:count], blocks[: count * width]
            self._remember(keys, now_s)
            span = Span(index, first, chain.parent(first), b"".join(keys), slots, blocks)
            stores.append(Store(span, until_s - now_s))
        return stores

    def _to_store(self, chain: Chain, first: int, full: int, now_s: float) -> list[bytes]:
        """The keys of the chunks to store that begin with `first`; none if that one needs none."""
        keys = chain.keys[first:full]
        if not chain.present and self._recent.keys().isdisjoint(keys):
            return keys
        for count, key in enumerate(keys):
            if self._needs_none(chain, first + count, key, now_s):
                return keys[:count]
        return keys

    def _needs_none(self, chain: Chain, chunk_index: int, key: bytes, now_s: float) -> bool:
        if chunk_index in chain.present and key not in self._quarantine:
            return True
        planned_s = self._recent.get(key)
        return planned_s is not None and now_s - planned_s < self._store_s

    def _remember(self, keys: Sequence[bytes], now_s: float) -> None:
        recent = self._recent
        for key in keys:
            recent.pop(key, None)
            recent[key] = now_s
        while len(recent) > RECENT_KEYS_MAX:
            del recent[next(iter(recent))]
