"""Which engine blocks are ours: computed by this engine on top of ours, or loaded and verified.

What a sibling connector loaded is not, nor what is computed on top of it, nor what was there when
the weights changed: none of it is stored. A block becomes ours when it is allocated and stops
being ours when a request of foreign origin gets it. A prefix cache may put blocks of different
requests together, so all blocks of a request are looked at when it is admitted, unless nothing
foreign was ever seen. One thread: the scheduler's.
"""

from collections.abc import Collection

from kvferry.offload.base import Part, Tables
from kvferry.offload.chunks import NULL_BLOCK


class Origins:
    """Without parts (the ranks have not agreed yet) nothing is ours."""

    def __init__(self) -> None:
        self._parts: tuple[Part, ...] = ()
        self._ours: set[int] = set()
        self._are_all_ours = True

    def agree(self, parts: tuple[Part, ...]) -> None:
        """The ranks have agreed. What was allocated before is not ours."""
        self._parts = parts
        self._ours.add(NULL_BLOCK)

    def forget(self) -> None:
        """Nothing that is in memory now is ours."""
        self._ours = {NULL_BLOCK}
        self._are_all_ours = False

    def allocated(self, blocks: Collection[int]) -> None:
        """New blocks, before anybody is told to fill them."""
        if self._parts:
            self._ours.update(blocks)
        elif blocks:
            self._are_all_ours = False

    def are_ours(self, tables: Tables, end_tokens: int) -> bool:
        """Whether the blocks of the first `end_tokens` of a request are ours, as far as it has
        them."""
        if self._are_all_ours or not self._parts:
            return bool(self._parts)
        return all(
            self._ours.issuperset(tables[part.group_index][: end_tokens // part.block_tokens])
            for part in self._parts
        )

    def disown(self, tables: Tables, first_token: int, end_tokens: int) -> None:
        """The blocks of the tokens [first, end) are not ours."""
        self._are_all_ours = False
        for part in self._parts:
            first, end = first_token // part.block_tokens, -(-end_tokens // part.block_tokens)
            self._ours.difference_update(tables[part.group_index][first:end])
        self._ours.add(NULL_BLOCK)
