"""Which chunks a step completes and stores. One thread: the scheduler's.

A chunk is planned in the step whose forward completes it: its tokens are known and accepted, its
blocks final after that forward. Where no slot is at hand it is planned in a later step as long as
the request owns the blocks. Not stored: what the catalog has, and what another request stores
already. The caller keeps out requests of foreign origin.
"""

from collections import OrderedDict
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
        self._recent: OrderedDict[bytes, float] = OrderedDict()
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
        for index, (part, chain) in enumerate(zip(self._parts, record.chains, strict=True)):
            full = end_tokens // part.chunk_tokens
            if full > chain.next_store:
                self._extend_keys(record, part, chain, full)
                stores += self._plan_part(record, index, full, tables[part.group_index], now_s)
        record.next_boundary = min(
            (chain.next_store + 1) * part.chunk_tokens
            for part, chain in zip(self._parts, record.chains, strict=True)
        )
        return stores

    def _extend_keys(self, record: Record, part: Part, chain: Chain, full: int) -> None:
        known = chain.known_count
        if full > known:
            parent = chain.parent(known)
            chain.keys += chunk_keys(self._hasher, part, record.request, parent, known, full)

    def _plan_part(
        self, record: Record, index: int, full: int, table: Sequence[int], now_s: float
    ) -> list[Store]:
        stores: list[Store] = []
        chain = record.chains[index]
        while True:
            first, end = self._next_run(chain, full, now_s)
            if first == end:
                break
            count, blocks = self._present_blocks(self._parts[index], table, first, end)
            if count == 0:  # a window has moved on
                self._metrics.count("kvferry_store_drops_total", reason="fenced")
                chain.next_store = first + 1
                continue
            taken = self.pools[index].take(count, now_s + self._store_s)
            if taken is None:
                break
            stores.append(self._store(index, chain, first, blocks, *taken, now_s))
        return stores

    def _next_run(self, chain: Chain, full: int, now_s: float) -> tuple[int, int]:
        """The next chunks to store, [first, end): empty if all up to `full` need none."""
        first = chain.next_store
        while first < full and self._needs_none(chain, first, now_s):
            first += 1
        chain.next_store = first
        end = first
        while end < full and not self._needs_none(chain, end, now_s):
            end += 1
        return first, end

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
        first: int,
        blocks: tuple[int, ...],
        slots: bytes,
        until_s: float,
        now_s: float,
    ) -> Store:
        count = len(slots) // SLOT.size
        width = self._parts[index].chunk_tokens // self._parts[index].block_tokens
        keys = chain.keys[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
        for start in range(0, len(keys), DIGEST_BYTES):
            self._recent[keys[start : start + DIGEST_BYTES]] = now_s
        while len(self._recent) > RECENT_KEYS_MAX:
            self._recent.popitem(last=False)
        chain.next_store = first + count
        span = Span(index, first, chain.parent(first), keys, slots, blocks[: count * width])
        return Store(span, until_s - now_s)
