"""Which engine blocks are ours: computed by this engine on top of ours, or loaded and verified.

What a sibling connector loaded is not, nor what is computed on top of it, nor what was there when
the weights changed: none of it is stored. A block becomes ours when it is allocated and stops
being ours when a request of foreign origin gets it. So a prefix is ours if its last block is, and
that is all that is looked at when a request is admitted. One thread: the scheduler's.
"""

from collections.abc import Iterable, Sequence

from kvferry.offload.base import Part


class Origins:
    """Without parts (the ranks have not agreed yet) nothing is ours."""

    def __init__(self) -> None:
        self._parts: tuple[Part, ...] = ()
        self._ours: set[int] = set()

    def restart(self, parts: tuple[Part, ...]) -> None:
        """From now on these are the parts; what is in memory is not ours."""
        self._parts = parts
        self._ours.clear()

    def allocated(self, blocks: Iterable[int]) -> None:
        """New blocks, before anybody is told to fill them."""
        if self._parts:
            self._ours.update(blocks)

    def are_ours(self, tables: Sequence[Sequence[int]], end_tokens: int) -> bool:
        """Whether the first `end_tokens` of a request are ours, by the last block in each part."""
        return bool(self._parts) and all(
            tables[part.group_index][end_tokens // part.block_tokens - 1] in self._ours
            for part in self._parts
            if end_tokens >= part.block_tokens
        )

    def disown(self, tables: Sequence[Sequence[int]], first_token: int, end_tokens: int) -> None:
        """The blocks of the tokens [first, end) are not ours."""
        for part in self._parts:
            first, end = first_token // part.block_tokens, -(-end_tokens // part.block_tokens)
            self._ours.difference_update(tables[part.group_index][first:end])
