"""Staging: kvferry's own memory between engine blocks and anything else.

Page-aligned memory, by default an anonymous mapping of the host's, cut into slots of one size and
registered once with whatever moves bytes. A slot is handed out and back exactly once; one that an
operation still uses after its deadline simply is not given back until the operation ends. Loads
come before stores: a part of the slots is kept for them.
"""

import ctypes
import heapq
import mmap
import threading
from collections.abc import Callable

from kvferry.errors import ConfigError, InternalError
from kvferry.layout import SLICE_ALIGNMENT_BYTES, round_up

Allocate = Callable[[int], tuple[int, object]]
"""Takes memory of so many bytes: its address, and what keeps it."""


def host_memory(length_bytes: int) -> tuple[int, object]:
    memory = mmap.mmap(-1, length_bytes)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory


def memory_from(offer: Callable[[int], tuple[int, object] | None]) -> Allocate:
    """What `offer` (of a page store) gives, or the host's memory where it needs none of its own."""
    return lambda length_bytes: offer(length_bytes) or host_memory(length_bytes)


class Staging:
    """`slot_bytes` is rounded up to 4 KiB. Any thread may take and give back."""

    def __init__(self, total_bytes: int, slot_bytes: int, allocate: Allocate = host_memory):
        self.slot_bytes = round_up(slot_bytes, SLICE_ALIGNMENT_BYTES)
        self.slot_count = total_bytes // self.slot_bytes
        if self.slot_count < 2:  # one for loads, one for stores
            raise ConfigError(
                "staging_too_small",
                f"staging_bytes={total_bytes} holds fewer than two pages of {self.slot_bytes} "
                f"bytes; set it to at least {2 * self.slot_bytes}",
                key="staging_bytes",
            )
        self.kept_for_loads = max(1, self.slot_count // 4)
        self.address = 0
        self._allocate = allocate
        self._memory: object = None
        self._free: list[int] = []
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def length_bytes(self) -> int:
        return self.slot_count * self.slot_bytes

    @property
    def taken_count(self) -> int:
        return len(self._taken)

    def open(self) -> None:
        self.address, self._memory = self._allocate(self.length_bytes)
        self._free = [self.address + i * self.slot_bytes for i in range(self.slot_count)]

    def close(self) -> None:
        """Idempotent. The mapping stays as long as anything still points into it (a write that
        hangs in the system): it is left to the end of the process if slots are out."""
        self._free = []

    def take_for_load(self) -> int | None:
        """The address of the first free slot, now the caller's; None if there is none. Slots that
        are adjacent are copied at once, and few of them stay in the processor's cache."""
        return self._take(0)

    def take_for_store(self) -> int | None:
        """As `take_for_load`, but leaves the slots that are kept for loads."""
        return self._take(self.kept_for_loads)

    def _take(self, leave_count: int) -> int | None:
        with self._lock:
            if len(self._free) <= leave_count:
                return None
            address = heapq.heappop(self._free)
            self._taken.add(address)
            return address

    def give_back(self, address: int) -> None:
        with self._lock:
            if address not in self._taken:
                raise InternalError("staging_returned_twice", "slot is not out", address=address)
            self._taken.remove(address)
            heapq.heappush(self._free, address)
