"""Slots reserved ahead, so that no round trip lies on the path of a store.

`SlotPool` and `Demand` belong to the scheduler thread and only take from what is there. `Room`
works on the runner thread: it reserves, and where free slots are short lets the store grow; and
ahead of need, every second, it evicts and deletes what was emptied.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.catalog.base import NO_TENANT, Catalog, Slot, Space, Want
from kvferry.clock import Clock
from kvferry.layout import Address
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Part
from kvferry.offload.space.growth import Growth
from kvferry.offload.space.recovery import is_gone
from kvferry.offload.space.unusable import Unusable
from kvferry.pages.base import PageStore, StoreFacts, slot_count

SEGMENTS_PER_CALL_MAX = 8
RESERVATIONS_PER_CALL_MAX = 8
"""Bound the time of one call: the rest comes with the next."""


class SlotPool:
    """Reserved slots of one part, packed, by reservation and oldest first, each reservation with
    the time until which it is surely ours. One thread: the scheduler's."""

    def __init__(self) -> None:
        self._reservations: deque[tuple[bytes, float]] = deque()
        self._taken_bytes = 0  # of the first one
        self._discarded: list[bytes] = []
        self._count = 0
        self._used_count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, packed: bytes, sure_until_s: float) -> None:
        """The slots of one reservation, as `pack` packs them."""
        if packed:
            self._reservations.append((packed, sure_until_s))
            self._count += len(packed) // SLOT.size

    def take(self, count: int, needed_until_s: float) -> tuple[bytes, float] | None:
        """Up to `count` slots of one reservation, packed, and the time until which they are ours,
        which is `needed_until_s` at least; None if there is none."""
        if self._reservations and self._reservations[0][1] < needed_until_s:
            self.discard_before(needed_until_s)
        if not self._reservations:
            return None
        packed, until_s = self._reservations[0]
        start = self._taken_bytes
        self._taken_bytes = start + count * SLOT.size
        taken = packed[start : self._taken_bytes]
        if self._taken_bytes >= len(packed):
            self._drop_first()
        taken_count = len(taken) // SLOT.size
        self._count -= taken_count
        self._used_count += taken_count
        return taken, until_s

    def take_used_count(self) -> int:
        """How many slots were taken since the last call."""
        used_count, self._used_count = self._used_count, 0
        return used_count

    def discard_before(self, needed_until_s: float) -> None:
        """Sets slots aside that are ours for too short a time."""
        while self._reservations and self._reservations[0][1] < needed_until_s:
            rest = self._reservations[0][0][self._taken_bytes :]
            self._discarded.append(rest)
            self._count -= len(rest) // SLOT.size
            self._drop_first()

    def take_discarded(self) -> bytes:
        """Slots set aside since the last call, packed, to be given back."""
        discarded, self._discarded = self._discarded, []
        return b"".join(discarded)

    def drain(self) -> bytes:
        """All slots, packed, to be given back."""
        self.discard_before(math.inf)
        return self.take_discarded()

    def _drop_first(self) -> None:
        self._reservations.popleft()
        self._taken_bytes = 0


class Demand:
    """How many slots to hold ready: what prompts in sight will need, and as many again as were
    used while an evicted slot waits out its grace time."""

    def __init__(self, ahead_count: int, count_max: int, grace_s: float):
        self._ahead_count = ahead_count
        self._count_max = count_max
        self._grace_s = grace_s
        self._used: deque[tuple[float, int]] = deque()
        self._used_count = 0

    def used(self, count: int, now_s: float) -> None:
        self._used.append((now_s, count))
        self._used_count += count

    def wanted_count(self, now_s: float, in_sight_count: int) -> int:
        while self._used and self._used[0][0] < now_s - self._grace_s:
            self._used_count -= self._used.popleft()[1]
        ahead = max(self._ahead_count, self._used_count)
        return min(self._count_max, ahead + in_sight_count)


def pack(slots: Iterable[Slot]) -> bytes:
    """24 bytes for each."""
    return b"".join(SLOT.pack(*slot.address, slot.generation) for slot in slots)


def unpack(packed: bytes) -> list[Slot]:
    return [
        Slot(Address(segment, slot), generation)
        for segment, slot, generation in SLOT.iter_unpack(packed)
    ]


def space_of(part: Part, facts: StoreFacts) -> Space:
    """The catalog's record of a part's namespace in this store."""
    return Space(
        namespace=part.namespace,
        slot_count=slot_count(facts, part.geometry),
        slot_bytes=part.geometry.slot_bytes(facts.alignment_bytes),
        slice_count=part.slice_count,
        chunk_tokens=part.chunk_tokens,
        description=part.description,
    )


class Reserved(NamedTuple):
    """Slots, packed. `is_growing`: there will be more in a moment."""

    packed: bytes
    is_growing: bool


class Room:
    """Makes slots for parts. Runs on the runner thread. `tenant`: the engine's, whose segments they
    lie in."""

    def __init__(
        self,
        catalog: Catalog,
        pages: PageStore,
        facts: StoreFacts,
        growth: Growth,
        clock: Clock,
        metrics: Metrics,
        tenant: bytes = NO_TENANT,
    ):
        self._tenant = tenant
        self._catalog = catalog
        self._pages = pages
        self._growth = growth
        self._unusable = Unusable(catalog, pages, clock)
        self._must_wait = False  # for segments that cannot be deleted now
        self._facts = facts
        self._metrics = metrics

    def reserve(self, part: Part, count: int, lease_s: float) -> Reserved:
        """Up to `count` slots; fewer if the store is full, and while segments are being made. What
        is short then, the next `collect` evicts for: this call never does."""
        namespace = part.namespace
        self._catalog.attach(space_of(part, self._facts))
        self._growth.settle()
        slots = self._reserve(namespace, count, lease_s)
        for _ in range(SEGMENTS_PER_CALL_MAX):
            if len(slots) >= count or not self._growth.add(part, self._tenant):
                break
            slots += self._reserve(namespace, count - len(slots), lease_s)
        return Reserved(pack(slots), self._growth.is_making(namespace))

    def _reserve(self, namespace: bytes, count: int, lease_s: float) -> list[Slot]:
        """Only slots that can be written to."""
        usable: list[Slot] = []
        for _ in range(RESERVATIONS_PER_CALL_MAX):
            wanted_count = count - len(usable)
            slots = self._catalog.reserve(namespace, wanted_count, lease_s, self._tenant)
            usable += self._unusable.sort_out(namespace, slots, lease_s)
            if len(usable) == count or len(slots) < wanted_count:
                break
        return usable

    def give_back(self, namespace: bytes, packed: bytes) -> None:
        """Slots that were reserved and will not be used."""
        self._catalog.abort(namespace, unpack(packed))

    def collect(self, wanted: Sequence[tuple[bytes, int]] = ()) -> None:
        """One sweep, and the deletion of the segments that it emptied. `wanted`: namespaces, and
        how many slots should become free."""
        self._growth.settle()
        self._unusable.review()
        wants = [
            Want(of, count + self._unusable.free_count(of), self._tenant) for of, count in wanted
        ]
        can_grow = not (self._growth.is_full or self._must_wait)
        swept = self._catalog.sweep(wants, can_grow)
        self._metrics.count("kvferry_evictions_total", swept.evicted_count)
        self._metrics.count("kvferry_quota_evictions_total", swept.quota_evicted_count)
        self._metrics.count("kvferry_pages_lapsed_total", swept.lapsed_count)
        self._metrics.count("kvferry_reservations_expired_total", swept.expired_count)
        self._must_wait = False
        for segment in swept.deletable_segments:
            if not is_gone(self._pages, segment):
                self._must_wait = True  # a later sweep says so again
                continue
            self._catalog.shrunk(segment)
            self._growth.freed()
            self._metrics.count("kvferry_segments_deleted_total")
