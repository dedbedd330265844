"""Slots that the catalog gives out and nobody here can write to: their root is out, or their
segment has lost its file.

To the catalog they are as good as others. Unless they were told apart here, they would be given out
again and again, and a sweep would take them for room: nothing would be stored until the root is
back.
"""

import logging
from collections.abc import Sequence

from kvferry.catalog.base import Catalog, Slot
from kvferry.catalog.snapshot import SegmentState
from kvferry.clock import Clock
from kvferry.errors import UnavailableError
from kvferry.layout import Address
from kvferry.offload.space.recovery import is_gone
from kvferry.pages.base import PageStore

log = logging.getLogger(__name__)


class Unusable:
    """Remembers the slots that could not be written to, and until when they are reserved: after
    that the catalog counts them as free. Runner's thread."""

    def __init__(self, catalog: Catalog, pages: PageStore, clock: Clock):
        self._catalog = catalog
        self._pages = pages
        self._clock = clock
        self._known: dict[bytes, dict[Address, float]] = {}
        self._segments: set[int] = set()  # that cannot be written to now

    def sort_out(self, namespace: bytes, slots: Sequence[Slot], lease_s: float) -> list[Slot]:
        """The slots that can be written to. The others stay reserved, for `lease_s` from now."""
        there = {s: self._is_there(s) for s in {slot.address.segment for slot in slots}}
        until_s, known = self._clock.now_s() + lease_s, self._known.setdefault(namespace, {})
        usable = []
        for slot in slots:
            if there[slot.address.segment]:
                usable.append(slot)
                known.pop(slot.address, None)
            else:
                known[slot.address] = until_s
        return usable

    def free_count(self, namespace: bytes) -> int:
        """How many the catalog counts as free, or soon free, that were not at the last review."""
        now_s, known = self._clock.now_s(), self._known.get(namespace, {})
        return sum(
            until_s <= now_s and address.segment in self._segments
            for address, until_s in known.items()
        )

    def review(self) -> None:
        """Finds out which segments can be written to again. Forgets those that are given up."""
        numbers = {address.segment for known in self._known.values() for address in known}
        if not numbers:
            return
        self._segments = {number for number in numbers if not self._is_there(number)}
        entries = self._catalog.segments()
        for known in self._known.values():
            for address in list(known):
                entry = entries.get(address.segment)
                if entry is None or entry.state is not SegmentState.READY:
                    del known[address]

    def _is_there(self, segment: int) -> bool:
        """Whether a segment's file can be used. One whose file is gone the catalog forgets: whoever
        removed it was killed before he could say so, or it was taken over at that moment."""
        try:
            if self._pages.has_segment(segment):
                return True
        except UnavailableError:
            return False
        if is_gone(self._pages, segment):
            log.warning("the file of segment %d is gone: it is forgotten", segment)
            self._catalog.shrunk(segment)
        return False
