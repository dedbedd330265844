"""What the pages of a push hold: pure functions that both sides ask, so that they agree.

A page is what a copier of `device` gathers: one slice for each KV head that a target takes from a
source, in the canonical order, so that it can be scattered into blocks of any layout. Header blocks
of slices travel with it and mean nothing: what proves a page comes in a message.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from kvferry import _native
from kvferry.errors import ConfigError, IncompatibleError
from kvferry.layout import HEADER_BYTES, PageGeometry, Region
from kvferry.transfer.messages import Cut
from kvferry.transfer.plan import Lane
from kvferry.transfer.topology import GroupLayout, RankLayout


def cut_of(lane: Lane, slot_bytes: int, page_tokens_max: int) -> Cut:
    """The largest pages of a lane that fit a slot, of so many tokens at most if that is possible.
    ConfigError if not even the smallest fits."""
    step_tokens = math.lcm(lane.source_block_tokens, lane.target_block_tokens)
    most = max(page_tokens_max // step_tokens, 1)
    for steps in range(most, 0, -1):
        if _geometry(lane.source, lane.source_block_tokens, steps * step_tokens).page_bytes <= (
            slot_bytes
        ):
            return Cut(
                lane.source_group,
                tuple(region.layer for region in lane.source),
                lane.first_head,
                lane.head_count,
                steps * step_tokens,
            )
    needed = _geometry(lane.source, lane.source_block_tokens, step_tokens).page_bytes
    raise ConfigError(
        "transfer.slot_bytes",
        f"slot_bytes={slot_bytes} is too small for one block of this model: set it to at"
        f" least {needed}",
        key="slot_bytes",
    )


def lane_geometry(lane: Lane, cut: Cut) -> PageGeometry:
    return _geometry(lane.source, lane.source_block_tokens, cut.chunk_tokens)


def source_of(layout: RankLayout, cut: Cut) -> tuple[GroupLayout, tuple[Region, ...], PageGeometry]:
    """What a source gathers for it. IncompatibleError if it has nothing of the kind."""
    group = layout.groups[cut.group] if 0 <= cut.group < len(layout.groups) else None
    heads = range(cut.first_head, cut.first_head + cut.head_count)
    known = {region.layer: region for region in group.regions} if group else {}
    if (
        not cut.layers
        or not known.keys() >= set(cut.layers)
        or not heads
        or heads.start not in group.heads
        or heads[-1] not in group.heads
        or cut.chunk_tokens < 1
        or cut.chunk_tokens % group.block_tokens
    ):
        raise IncompatibleError("transfer.cut", "a reader wants what is not here")
    regions = tuple(
        _narrow(known[layer], heads.start - group.first_head, len(heads)) for layer in cut.layers
    )
    return group, regions, _geometry(regions, group.block_tokens, cut.chunk_tokens)


def checksums_of(address: int, geometry: PageGeometry) -> tuple[int, ...]:
    """Of the slices of a page in host memory, in their order. Off the GIL."""
    return tuple(
        _native.checksum(
            address + number * geometry.slice_bytes + HEADER_BYTES, geometry.padded_payload_bytes
        )
        for number in range(geometry.slice_count)
    )


def _narrow(region: Region, skipped_heads: int, head_count: int) -> Region:
    skipped_bytes = skipped_heads * region.head_stride_bytes
    return replace(region, base_address=region.base_address + skipped_bytes, head_count=head_count)


def _geometry(regions: Sequence[Region], block_tokens: int, chunk_tokens: int) -> PageGeometry:
    block_bytes = sum(region.block_head_bytes for region in regions)
    blocks = chunk_tokens // block_tokens
    return PageGeometry(regions[0].head_count, blocks * block_bytes, chunk_tokens)
