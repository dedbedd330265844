"""Which chunks a step completes and stores. One thread: the scheduler's.

A chunk is planned in the step whose forward completes it: its tokens are known and accepted, its
blocks final after that forward. Where no slot is at hand it is planned in a later step as long as
the request owns the blocks. Not stored: what the catalog has, and what another request stores
already. The caller keeps out requests of foreign origin.
"""

from collections.abc import Sequence

from kvferry.keys import DIGEST_BYTES
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Part, Span, Store
from kvferry.offload.chunks import NULL_BLOCK, span_blocks
from kvferry.offload.lookup import Hasher, chunk_keys
from kvferry.offload.quarantine import Quarantine
from kvferry.offload.record import Chain, Record
from kvferry.offload.room import SlotPool

RECENT_KEYS_MAX = 65536
"""Keys planned lately: until `store_s` has passed, when the store has ended one way or the other,
another request with the same prefix does not store them again."""


class StorePlanner:
    """`store_s`: how long a store may take: slots with less of their lease left are not used."""

    def __init__(self, hasher: Hasher, metrics: Metrics, quarantine: Quarantine, store_s: float):
        self._hasher = hasher
        self._metrics = metrics
        self._quarantine = quarantine
        self._store_s = store_s
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

    @property
    def has_slots(self) -> bool:
        return any(self.pools)

    def count_missed(self, record: Record, end_tokens: int, now_s: float) -> None:
        """What was complete at the request's end and had no slot."""
        for part, chain in zip(self._parts, record.chains, strict=False):
            full = min(end_tokens // part.chunk_tokens, chain.known_count)
            missed = [
                i for i in range(chain.next_store, full) if not self._needs_none(chain, i, now_s)
            ]
            if missed:
                self._metrics.count("kvferry_store_drops_total", len(missed), reason="no_slot")

    def plan(
        self, record: Record, tables: Sequence[Sequence[int]], end_tokens: int, now_s: float
    ) -> list[Store]:
        """Stores for the chunks of `record` that are complete at `end_tokens`."""
        if not record.chains:  # the prompt is not hashed yet
            return []
        stores: list[Store] = []
        boundaries = []
        for index, chain in enumerate(record.chains):
            part = self._parts[index]
            full = end_tokens // part.chunk_tokens
            if full > chain.next_store:
                self._extend_keys(record, part, chain, full)
                stores += self._plan_part(chain, index, full, tables[part.group_index], now_s)
            boundaries.append((chain.next_store + 1) * part.chunk_tokens)
        record.next_boundary = min(boundaries)
        return stores

    def _extend_keys(self, record: Record, part: Part, chain: Chain, full: int) -> None:
        known = chain.known_count
        if full > known:
            parent = chain.parent(known)
            chain.keys += chunk_keys(self._hasher, part, record.request, parent, known, full)

    def _plan_part(
        self, chain: Chain, index: int, full: int, table: Sequence[int], now_s: float
    ) -> list[Store]:
        stores: list[Store] = []
        while self._skip(chain, full, now_s):
            first, end = chain.next_store, self._end_of_run(chain, full, now_s)
            count, blocks = self._present_blocks(self._parts[index], table, first, end)
            if count == 0:  # a window has moved on
                self._metrics.count("kvferry_store_drops_total", reason="fenced")
                chain.next_store = first + 1
                continue
            taken = self.pools[index].take(count, now_s + self._store_s)
            if taken is None:
                break
            stores.append(self._store(index, chain, blocks, *taken, now_s))
        return stores

    def _skip(self, chain: Chain, full: int, now_s: float) -> bool:
        """Goes on to the next chunk to store. False if there is none before `full`."""
        while chain.next_store < full and self._needs_none(chain, chain.next_store, now_s):
            chain.next_store += 1
        return chain.next_store < full

    def _end_of_run(self, chain: Chain, full: int, now_s: float) -> int:
        """The end of the chunks to store that begin with the next one."""
        end = chain.next_store + 1
        while end < full and not self._needs_none(chain, end, now_s):
            end += 1
        return end

    def _needs_none(self, chain: Chain, chunk_index: int, now_s: float) -> bool:
        key = chain.key(chunk_index)
        if chunk_index in chain.present and key not in self._quarantine:
            return True
        planned_s = self._recent.get(key)
        return planned_s is not None and now_s - planned_s < self._store_s

    def _present_blocks(
        self, part: Part, table: Sequence[int], first: int, end: int
    ) -> tuple[int, tuple[int, ...]]:
        """How many chunks from `first` on have all their blocks, and these blocks."""
        width = part.chunk_tokens // part.block_tokens
        blocks = span_blocks(part, table, first, end)
        if NULL_BLOCK in blocks:
            blocks = blocks[: blocks.index(NULL_BLOCK)]
        count = len(blocks) // width
        return count, blocks[: count * width]

    def _store(
        self,
        index: int,
        chain: Chain,
        blocks: tuple[int, ...],
        slots: bytes,
        until_s: float,
        now_s: float,
    ) -> Store:
        """Of the next chunks of a chain, as many as there are slots for."""
        first, count = chain.next_store, len(slots) // SLOT.size
        chain.next_store = first + count
        keys = chain.keys[first * DIGEST_BYTES : chain.next_store * DIGEST_BYTES]
        self._remember(keys, now_s)
        width = self._parts[index].chunk_tokens // self._parts[index].block_tokens
        span = Span(index, first, chain.parent(first), keys, slots, blocks[: count * width])
        return Store(span, until_s - now_s)

    def _remember(self, keys: bytes, now_s: float) -> None:
        recent = self._recent
        for start in range(0, len(keys), DIGEST_BYTES):
            key = keys[start : start + DIGEST_BYTES]
            recent.pop(key, None)
            recent[key] = now_s
        while len(recent) > RECENT_KEYS_MAX:
            del recent[next(iter(recent))]
