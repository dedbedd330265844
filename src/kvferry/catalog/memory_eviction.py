"""What `eviction` asks for and leaves behind, in dictionaries."""

from collections.abc import Iterable
from typing import Protocol

from kvferry.catalog.base import CLASS_COUNT, Policy
from kvferry.catalog.eviction import (
    Head,
    Recall,
    bucket_of,
    remembered,
    returned,
    use_class,
    victim,
)
from kvferry.layout import Address


class _Page(Protocol):
    """What is asked of a page."""

    address: Address
    age: int
    chunk_index: int
    uses: int


class MemoryEviction:
    """What was learned, by namespace. `slots_max`: how many slots a namespace could have."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._recalls: dict[bytes, Recall] = {}
        self._ghosts: dict[tuple[bytes, int], bytes] = {}

    def attach(self, namespace: bytes) -> None:
        self._recalls.setdefault(namespace, Recall())

    def forget(self, namespace: bytes) -> None:
        del self._recalls[namespace]
        for place in [place for place in self._ghosts if place[0] == namespace]:
            del self._ghosts[place]

    def coldest(self, namespace: bytes, pages: Iterable[_Page], age: int) -> Head | None:
        """The one of the pages that goes first at the step `age`."""
        heads: list[Head | None] = [None] * CLASS_COUNT
        for page in pages:
            head = Head(page.age, page.chunk_index, page.address)
            use = use_class(page.uses)
            heads[use] = min(heads[use] or head, head, key=_coldness)
        return victim(self._policy, heads, age, self._recalls[namespace].reach)

    def remember(self, namespace: bytes, key: bytes, uses: int, slots_max: int) -> None:
        """After a page was evicted to make room."""
        if self._policy is Policy.ADAPTIVE:
            place = namespace, bucket_of(key, slots_max)
            self._recalls[namespace], self._ghosts[place] = remembered(
                self._recalls[namespace], self._ghosts.get(place, b""), key, uses
            )

    def recall(self, namespace: bytes, key: bytes, slots_max: int) -> int:
        """The uses that a page had when it was evicted; 0: no ghost of it is left."""
        place = namespace, bucket_of(key, slots_max)
        recall, bucket = self._recalls[namespace], self._ghosts.get(place, b"")
        recall, bucket, uses = returned(recall, bucket, key, slots_max)
        if uses:
            self._recalls[namespace], self._ghosts[place] = recall, bucket
        return uses

    def recalls(self) -> dict[bytes, tuple[float, int, int]]:
        return {namespace: tuple(recall) for namespace, recall in self._recalls.items()}


def _coldness(head: Head) -> tuple[int, int, Address]:
    return head.age, -head.chunk_index, head.address
