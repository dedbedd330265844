"""Block pool, block tables and prefix cache, as vLLM has them in small.

A freed block keeps its content, and stays findable, until it is handed out again. Block 0 stands
for "none".
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.testing.world.requests import SimRequest
from kvferry.testing.world.shape import BLOCK_TOKENS, Group


class BlockPool:
    """`labels`: with which weights a block's content was made, by whoever may write to it.
    `new_blocks`: handed out since the last step took them."""

    def __init__(self, block_count: int):
        self._references = [0] * block_count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, block_count))
        self._block_of: dict[tuple[int, bytes], int] = {}
        self._name_of: dict[int, tuple[int, bytes]] = {}
        self.labels: dict[int, bytes] = {}
        self.new_blocks: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> list[int]:
        return [block for block, count in enumerate(self._references) if count]

    def allocate(self, count: int) -> list[int]:
        """The longest free ones. The caller has looked at `free_count`."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            assert self._references[block] == 0, f"block {block} has an owner"
            self._references[block] = 1
            self._forget(block)
        self.new_blocks.update(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        for block in filter(None, blocks):
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """The last block of a request is reused first."""
        for block in filter(None, reversed(blocks)):
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def unshared_count(self, blocks: Sequence[int]) -> int:
        """How many free blocks sharing these would take."""
        return sum(block in self._free for block in set(blocks))

    def find(self, group_index: int, digest: bytes) -> int | None:
        return self._block_of.get((group_index, digest))

    def publish(self, block: int, group_index: int, digest: bytes) -> None:
        """Makes a full block findable, unless there is one with these tokens."""
        name = (group_index, digest)
        if block and block not in self._name_of and name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def forget_all(self) -> None:
        self._block_of.clear()
        self._name_of.clear()

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]


class Tables:
    """Block tables of requests over one pool."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool, has_prefix_cache: bool):
        self._groups = groups
        self._pool = pool
        self._has_prefix_cache = has_prefix_cache

    def hits(self, request: SimRequest) -> list[list[int]]:
        """Tables of the longest cached prefix that leaves a token to compute."""
        limit = (len(request.tokens) - 1) // BLOCK_TOKENS if self._has_prefix_cache else 0
        count = limit
        while count:
            reaches = [self._reach(request, index, count) for index in range(len(self._groups))]
            if min(reaches) == count:
                break
            count = min(reaches)
        return [self._hit_table(request, index, count) for index in range(len(self._groups))]

    def _reach(self, request: SimRequest, group_index: int, count: int) -> int:
        """The greatest boundary up to `count` blocks that a group can go on from."""
        while count:
            blocks = self._hit_table(request, group_index, count)
            first = self._first_needed(group_index, count * BLOCK_TOKENS)
            missing = [i for i in range(first, count) if not blocks[i]]
            if not missing:
                return count
            full = self._groups[group_index].window_tokens is None
            count = missing[0] if full else missing[-1]
        return 0

    def _hit_table(self, request: SimRequest, group_index: int, count: int) -> list[int]:
        first = self._first_needed(group_index, count * BLOCK_TOKENS)
        found = [
            self._pool.find(group_index, request.digest((i + 1) * BLOCK_TOKENS)) or 0
            for i in range(first, count)
        ]
        return [0] * first + found

    def _first_needed(self, group_index: int, boundary: int) -> int:
        """The first block that is needed to go on from a token count."""
        window = self._groups[group_index].window_tokens
        return 0 if window is None else max(0, boundary - window + 1) // BLOCK_TOKENS

    def admit(
        self, request: SimRequest, hits: list[list[int]], tokens: int, kept_count: int
    ) -> bool:
        """Gives a request its cached blocks and new ones up to `tokens`; False if too few are
        free for all of its tokens and `kept_count` more. Blocks before the window of
        `request.computed` are never allocated."""
        missing = self._missing_count(request, hits, max(tokens, len(request.tokens)))
        shared = [block for table in hits for block in table if block]
        free_count = self._pool.free_count - kept_count
        if missing + self._pool.unshared_count(shared) > free_count:
            return False
        request.tables = hits
        self._pool.share(shared)
        return self.extend(request, tokens)

    def lacking_count(self, request: SimRequest) -> int:
        """How many blocks it takes until all tokens of a request have room."""
        return self._missing_count(request, request.tables, len(request.tokens))

    def has_room(self, request: SimRequest) -> bool:
        """Whether that many are free."""
        return self.lacking_count(request) <= self._pool.free_count

    def _missing_count(self, request: SimRequest, tables: list[list[int]], tokens: int) -> int:
        return sum(
            len(self._missing(index, len(table), request.computed, tokens))
            for index, table in enumerate(tables)
        )

    def extend(self, request: SimRequest, tokens: int) -> bool:
        """Blocks for `tokens` tokens; False if too few are free. Those behind a window go back."""
        self._drop_passed(request)
        wanted = [
            self._missing(index, len(table), request.computed, tokens)
            for index, table in enumerate(request.tables)
        ]
        if sum(map(len, wanted)) > self._pool.free_count:
            return False
        for table, positions in zip(request.tables, wanted, strict=True):
            table.extend([0] * (-(-tokens // BLOCK_TOKENS) - len(table)))
            for position, block in zip(positions, self._pool.allocate(len(positions)), strict=True):
                table[position] = block
        return True

    def _missing(self, group_index: int, have: int, computed: int, tokens: int) -> range:
        first = max(have, self._first_needed(group_index, computed))
        return range(first, max(first, -(-tokens // BLOCK_TOKENS)))

    def _drop_passed(self, request: SimRequest) -> None:
        for index, table in enumerate(request.tables):
            passed = min(self._first_needed(index, request.computed), len(table))
            self._pool.release(table[:passed])
            table[:passed] = [0] * passed

    def publish(self, request: SimRequest, tokens: int) -> None:
        """Makes the full blocks of the first `tokens` tokens findable."""
        if not self._has_prefix_cache:
            return
        for index, table in enumerate(request.tables):
            for position in range(tokens // BLOCK_TOKENS):
                digest = request.digest((position + 1) * BLOCK_TOKENS)
                self._pool.publish(table[position], index, digest)

    def free(self, request: SimRequest) -> None:
        tables, request.tables = request.tables, [[] for _ in self._groups]
        for table in tables:
            self._pool.release(table)
