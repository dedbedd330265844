"""One rank's KV cache in real memory, in any of the orders that engines have, and what is in it.

Content is a function of a text, layer, head and token position, so that a byte that went to the
wrong place is seen, whoever moved it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvferry.layout import Region
from kvferry.testing.clock import Chance
from kvferry.testing.staging import Buffer
from kvferry.transfer.base import Range
from kvferry.transfer.topology import GroupLayout, RankLayout

ORDERS = ("LBHN", "LBNH", "BLHN", "BLNH", "LHBN", "BHLN")
"""Of layers, kernel blocks, heads, tokens: outermost first."""
TOKEN_BYTES = 8


@dataclass(frozen=True)
class GroupModel:
    """One cache group of a model: equal on all engines."""

    layers: tuple[str, ...]
    heads: int
    is_opaque: bool = False


@lru_cache(maxsize=1 << 16)
def token_content(text: str, layer: str, head: int, token: int) -> bytes:
    seed = f"{text} {layer} {head} {token}".encode()
    return hashlib.shake_128(seed).digest(TOKEN_BYTES)


class GroupMemory:
    """One group on one rank: `heads` of it, in blocks of `kernel_blocks` kernel blocks."""

    def __init__(
        self,
        model: GroupModel,
        heads: range,
        layers: Sequence[str],
        block_count: int,
        block_tokens: int,
        kernel_blocks: int,
        order: str,
        gap_bytes: int = 0,
    ):
        self.model = model
        self.heads = heads
        self.layers = tuple(layers)
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._kernel_blocks = kernel_blocks
        unit = block_tokens // kernel_blocks
        tokens, content = (1, unit * TOKEN_BYTES) if model.is_opaque else (unit, TOKEN_BYTES)
        counts = {
            "L": len(layers),
            "B": block_count * kernel_blocks,
            "H": len(heads),
            "N": tokens,
        }
        self._content_bytes, self._tokens = content, tokens
        self._strides, step = {}, content
        for name in reversed(order):
            self._strides[name] = step
            step = step * counts[name] + gap_bytes
        self._buffer = Buffer(step)

    @property
    def memory(self) -> Range:
        return Range(self._buffer.address, self._buffer.length_bytes)

    def layout(self) -> GroupLayout:
        steps = self._strides
        regions = tuple(
            Region(
                layer,
                self._buffer.address + index * steps["L"],
                self.block_count,
                self._kernel_blocks,
                len(self.heads),
                self._tokens,
                self._content_bytes,
                steps["B"],
                steps["H"],
                steps["N"],
            )
            for index, layer in enumerate(self.layers)
        )
        return GroupLayout(
            self.block_tokens, self.heads.start, self.model.heads, self.model.is_opaque, regions
        )

    def write(self, block: int, index: int, text: str, token_count: int = 1 << 40) -> None:
        """Block `block` becomes block number `index` of a request with this text, in its tokens
        before `token_count`. Opaque blocks as a whole."""
        for at, content in self._cells(block, index, text, token_count):
            self._buffer.view[at : at + len(content)] = content

    def holds(self, block: int, index: int, text: str, token_count: int = 1 << 40) -> bool:
        """Whether it is that, in its tokens before `token_count`. Opaque blocks as a whole."""
        return all(
            self._buffer.view[at : at + len(content)] == content
            for at, content in self._cells(block, index, text, token_count)
        )

    def spoil(self, block: int) -> None:
        for at, content in self._cells(block, 0, ""):
            self._buffer.view[at : at + len(content)] = b"\xee" * len(content)

    def _cells(self, block: int, index: int, text: str, end: int = 1 << 40):
        unit = self.block_tokens // self._kernel_blocks
        steps = self._strides
        for kernel in range(self._kernel_blocks):
            first = index * self.block_tokens + kernel * unit
            for layer_index, layer in enumerate(self.layers):
                for head_index, head in enumerate(self.heads):
                    at = (block * self._kernel_blocks + kernel) * steps["B"]
                    at += layer_index * steps["L"] + head_index * steps["H"]
                    tokens = [
                        token_content(text, layer, head, token)
                        for token in range(first, first + unit)
                    ]
                    if self.model.is_opaque:
                        if first < end:
                            yield at, b"".join(reversed(tokens))
                        continue
                    for number, content in enumerate(tokens):
                        if first + number < end:
                            yield at + number * steps["N"], content


@dataclass(frozen=True)
class EngineShape:
    """How one engine holds a model. `order`, `block_tokens`, `kernel_blocks`: by group."""

    rank_count: int
    block_tokens: tuple[int, ...]
    kernel_blocks: tuple[int, ...]
    orders: tuple[str, ...]
    block_count: int
    gap_bytes: int = 0
    stage_count: int = 1


def rank_heads(heads: int, rank_count: int, rank: int) -> range:
    """The heads of a rank, as tensor parallelism gives them out."""
    if heads >= rank_count:
        each = heads // rank_count
        return range(rank * each, (rank + 1) * each)
    first = rank * heads // rank_count
    return range(first, first + 1)


def engine_memory(models: Sequence[GroupModel], shape: EngineShape) -> list[list[GroupMemory]]:
    """By rank, by group. Stages come one after the other, each with its part of the layers."""
    ranks = []
    for stage in range(shape.stage_count):
        for rank in range(shape.rank_count):
            groups = []
            for number, model in enumerate(models):
                each = -(-len(model.layers) // shape.stage_count)
                layers = model.layers[stage * each : (stage + 1) * each]
                if not layers:
                    continue
                groups.append(
                    GroupMemory(
                        model,
                        rank_heads(model.heads, shape.rank_count, rank),
                        layers,
                        shape.block_count,
                        shape.block_tokens[number],
                        shape.kernel_blocks[number],
                        shape.orders[number],
                        shape.gap_bytes,
                    )
                )
            ranks.append(groups)
    return ranks


def rank_layouts(memory: Sequence[Sequence[GroupMemory]]) -> list[RankLayout]:
    return [
        RankLayout(rank, tuple(group.layout() for group in groups))
        for rank, groups in enumerate(memory)
    ]


def draw_models(chance: Chance) -> tuple[GroupModel, ...]:
    """One or two groups; layers have names that no two groups share."""
    models = []
    for group in range(chance.choice([1, 1, 2])):
        layers = tuple(f"layer {group}.{n}" for n in range(chance.choice([1, 2, 3])))
        models.append(GroupModel(layers, chance.choice([1, 2, 4]), chance.random() < 0.3))
    return tuple(models)


def draw_shape(
    chance: Chance, models: Sequence[GroupModel], opaque_tokens: int, block_count: int
) -> EngineShape:
    """`opaque_tokens`: block size of opaque groups, which must be equal on both sides."""
    tokens = [opaque_tokens if m.is_opaque else chance.choice([2, 4, 8]) for m in models]
    kernels = [1 if m.is_opaque else chance.choice([1, 1, 2]) for m in models]
    return EngineShape(
        chance.choice([1, 2, 4]),
        tuple(tokens),
        tuple(kernels),
        tuple(chance.choice(ORDERS) for _ in models),
        block_count,
        chance.choice([0, 8]),
        1 if len(models) > 1 else chance.choice([1, 1, 2]),
    )
