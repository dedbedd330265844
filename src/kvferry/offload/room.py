"""Slots reserved ahead, so that no round trip lies on the path of a store.

`SlotPool` belongs to the scheduler thread and only takes from what is there. `make_room` runs on
the runner thread: it reserves, and where free slots are short adds a segment, evicts, deletes what
was emptied, and reserves again.
"""

from collections import deque
from collections.abc import Sequence

from kvferry.catalog.base import Catalog, Slot
from kvferry.errors import ExhaustedError
from kvferry.layout import Address
from kvferry.offload.base import SLOT, Part
from kvferry.pages.base import PageStore

SEGMENTS_PER_CALL_MAX = 8
"""Bounds the time of one call: the rest comes with the next."""


class SlotPool:
    """Reserved slots of one part, oldest first, each with the time until which it is surely ours.

    One thread: the scheduler's.
    """

    def __init__(self) -> None:
        self._slots: deque[tuple[bytes, float]] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slots: Sequence[Slot], sure_until_s: float) -> None:
        self._slots.extend((SLOT.pack(*slot.address, slot.generation), sure_until_s)
                           for slot in slots)

    def take(self, count: int, needed_until_s: float) -> tuple[bytes, float] | None:
        """Up to `count` slots, packed and concatenated, all ours until `needed_until_s` at least,
        and the time until which the first to end is ours; None if there is none."""
        while self._slots and self._slots[0][1] < needed_until_s:
            self._slots.popleft()  # its lease ends by itself
        taken = [self._slots.popleft() for _ in range(min(count, len(self._slots)))]
        if not taken:
            return None
        return b"".join(packed for packed, _ in taken), min(until for _, until in taken)

    def drain(self) -> list[Slot]:
        """All slots, to be given back."""
        slots = [unpack(packed) for packed, _ in self._slots]
        self._slots.clear()
        return slots


class Demand:
    """How many slots to hold ready: what prompts in sight will need, and as many again as were
    used while an evicted slot waits out its grace time."""

    def __init__(self, ahead_count: int, count_max: int, grace_s: float):
        self._ahead_count = ahead_count
        self._count_max = count_max
        self._grace_s = grace_s
        self._used: deque[tuple[float, int]] = deque()
        self.in_sight_count = 0

    def used(self, count: int, now_s: float) -> None:
        self._used.append((now_s, count))

    def wanted_count(self, now_s: float) -> int:
        while self._used and self._used[0][0] < now_s - self._grace_s:
            self._used.popleft()
        lately = sum(count for _, count in self._used)
        return min(self._count_max, max(self._ahead_count, lately) + self.in_sight_count)


def unpack(packed: bytes) -> Slot:
    segment, slot, generation = SLOT.unpack(packed)
    return Slot(Address(segment, slot), generation)


def make_room(
    catalog: Catalog, pages: PageStore, part: Part, count: int, lease_s: float
) -> list[Slot]:
    """Reserves up to `count` slots, fewer if the store is full. Runs on the runner thread."""
    slots = catalog.reserve(part.namespace, count, lease_s)
    for _ in range(SEGMENTS_PER_CALL_MAX):
        if len(slots) >= count or not _grow(catalog, pages, part):
            break
        slots += catalog.reserve(part.namespace, count - len(slots), lease_s)
    if len(slots) < count:
        collect(catalog, pages, [(part.namespace, count - len(slots))])
    return slots


def _grow(catalog: Catalog, pages: PageStore, part: Part) -> bool:
    segment = catalog.grow(part.namespace)
    if segment is None:
        return False
    try:
        pages.create_segment(segment, part.namespace, part.geometry)
    except ExhaustedError:  # the disk is full before the budget is
        catalog.shrunk(segment)
        raise
    catalog.grown(segment)
    return True


def collect(catalog: Catalog, pages: PageStore, wanted: Sequence[tuple[bytes, int]] = ()) -> int:
    """One sweep, and the deletion of the segments that it emptied. Returns how many pages were
    evicted."""
    swept = catalog.sweep(wanted)
    for segment in swept.deletable_segments:
        pages.delete_segment(segment)
        catalog.shrunk(segment)
    return swept.evicted_count
