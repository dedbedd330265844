"""What one rank's KV cache looks like, as it says to its peers.

Layers are matched by name and tokens by absolute position; block tables are counted by the
position of a group inside its own engine. A rank of an engine holds consecutive KV heads of the
model (MLA: the one there is).
"""

import msgspec

from kvferry.errors import IncompatibleError
from kvferry.layout import Region

ADDRESS_MAX = 1 << 63
COUNT_MAX = 1 << 31


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """One cache group on one rank. All regions hold the same heads.

    `block_tokens`: of a scheduler's block. `is_opaque`: a block's part of a head can only be moved
    whole (`layout.Region`).
    """

    block_tokens: int
    first_head: int
    model_heads: int
    is_opaque: bool
    regions: tuple[Region, ...]

    @property
    def unit_tokens(self) -> int:
        """Tokens in one kernel block, the unit of a transfer."""
        return self.block_tokens // self.regions[0].kernel_blocks

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.regions[0].head_count)


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """All groups of one rank, in the order of its engine's block tables. `rank`: among all ranks of
    the engine, stages included."""

    rank: int
    groups: tuple[GroupLayout, ...]


def check_layout(layout: RankLayout) -> None:
    """What came from a peer makes sense in itself. Raises IncompatibleError."""
    for group in layout.groups:
        names = [region.layer for region in group.regions]
        _require(bool(names) and len(set(names)) == len(names), layout, "layers")
        _require(0 <= group.first_head < group.heads.stop <= group.model_heads, layout, "heads")
        for region in group.regions:
            _check_region(layout, group, region)


def _check_region(layout: RankLayout, group: GroupLayout, region: Region) -> None:
    first = group.regions[0]
    counts = (region.block_count, region.kernel_blocks, region.block_tokens, region.content_bytes)
    strides = (region.block_stride_bytes, region.head_stride_bytes, region.token_stride_bytes)
    _require(all(0 < value < COUNT_MAX for value in counts), layout, region.layer)
    _require(all(0 < value < ADDRESS_MAX for value in strides), layout, region.layer)
    _require(0 < region.base_address < ADDRESS_MAX, layout, region.layer)
    _require(region.head_count == first.head_count, layout, "heads")
    _require(region.kernel_blocks == first.kernel_blocks, layout, "kernel_blocks")
    _require(region.block_count == first.block_count, layout, "block_count")
    tokens = region.kernel_blocks * (1 if group.is_opaque else region.block_tokens)
    is_whole = group.block_tokens % tokens == 0 if group.is_opaque else group.block_tokens == tokens
    _require(is_whole and (not group.is_opaque or region.block_tokens == 1), layout, "block_tokens")


def _require(holds: bool, layout: RankLayout, field: str) -> None:
    if not holds:
        raise IncompatibleError(
            "transfer.layout", f"rank {layout.rank} describes its {field} in a way that cannot be"
        )
