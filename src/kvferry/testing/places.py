"""The medium of the memory store, open beneath every check: a `testing.pages.Place`."""

from kvferry.clock import Clock
from kvferry.layout import Address
from kvferry.pages import memory
from kvferry.pages.facts import Asked

ASKED = Asked(capacity_bytes=8 << 20, alignment_bytes=4096, segment_bytes=1 << 20)


class MemoryPlace:
    """A `Medium` whose stored bytes can be read and replaced."""

    digest = staticmethod(memory.digest)

    def __init__(self, clock: Clock, medium: memory.Medium | None = None):
        self.medium = medium or memory.Medium()
        self._clock = clock

    def store(self, asked: Asked = ASKED) -> memory.MemoryPages:
        return memory.MemoryPages(self.medium, self._clock, asked)

    def page(self, address: Address) -> bytes:
        segment = self.medium.segments[address.segment]
        hole = bytes(segment.facts.geometry.page_bytes)
        return bytes(segment.slots.get(address.slot, hole))

    def replace_page(self, address: Address, content: bytes) -> None:
        self.medium.segments[address.segment].slots[address.slot] = bytearray(content)
