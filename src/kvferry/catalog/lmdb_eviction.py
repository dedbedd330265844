"""What `eviction` asks for and leaves behind, in the tables of LMDB, inside one transaction."""

from kvferry.catalog.base import CLASS_COUNT, Policy
from kvferry.catalog.eviction import Head, bucket_of, more_uses, remembered, returned, victim
from kvferry.catalog.lmdb_environment import Tables
from kvferry.catalog.lmdb_records import (
    SpaceRow,
    bucket_key,
    class_key,
    number_key,
    unpack_cold,
)


class LmdbEviction:
    """`segments_max`: how many segments the store's budget holds. A row that is returned is for
    the caller to write."""

    def __init__(self, tables: Tables, policy: Policy, segments_max: int):
        self._tables = tables
        self._policy = policy
        self._segments_max = max(1, segments_max)

    def coldest(self, row: SpaceRow, share: int, age: int) -> Head | None:
        """The page of a share of a namespace that goes first at the step `age`."""
        return victim(self._policy, self._heads(share), age, row.recall.reach)

    def oldest(self, share: int) -> Head | None:
        """The page of a share that was not used for longest."""
        return victim(Policy.LRU, self._heads(share), 0, 0.0)

    def _heads(self, share: int) -> list[Head | None]:
        found = [self._tables.cold.first(class_key(share, use)) for use in range(CLASS_COUNT)]
        return [pair and unpack_cold(pair[0]) for pair in found]

    def remember(self, row: SpaceRow, key: bytes, uses: int) -> SpaceRow:
        """After a page was evicted to make room."""
        if self._policy is not Policy.ADAPTIVE:
            return row
        place = self._place(row, key)
        recall, bucket = remembered(row.recall, self._tables.ghosts.get(place) or b"", key, uses)
        self._tables.ghosts.put(place, bucket)
        return row._replace(recall=recall)

    def recall(self, row: SpaceRow, key: bytes) -> tuple[SpaceRow, int]:
        """When a page is published: also the uses that it has now."""
        place = self._place(row, key)
        bucket = self._tables.ghosts.get(place) or b""
        recall, bucket, uses = returned(row.recall, bucket, key, self._slots_max(row))
        if uses:
            self._tables.ghosts.put(place, bucket)
            row = row._replace(recall=recall)
        return row, more_uses(uses)

    def forget(self, row: SpaceRow) -> None:
        for key, _ in list(self._tables.ghosts.scan(number_key(row.number))):
            self._tables.ghosts.delete(key)

    def _place(self, row: SpaceRow, key: bytes) -> bytes:
        return bucket_key(row.number, bucket_of(key, self._slots_max(row)))

    def _slots_max(self, row: SpaceRow) -> int:
        return self._segments_max * row.space.slot_count
