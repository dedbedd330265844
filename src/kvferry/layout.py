"""Geometry of pages: what a page, a slice and an extent are, and where bytes lie in engine memory.

A page holds one chunk (`chunk_tokens` consecutive tokens of one cache group) of all KV heads and
all layers of a pipeline stage. Order inside a page, outermost first: KV head, layer, block or
token, content. A slice is the part of one KV head: one header block of 4 KiB, then the payload,
padded with zeros to 4 KiB. A rank holds an extent: consecutive slices, one contiguous I/O.

    slot:  | header | payload of head 0 | header | payload of head 1 | ... | padding to alignment |
             4 KiB     padded to 4 KiB
"""

from dataclasses import dataclass
from typing import NamedTuple

HEADER_BYTES = 4096
SLICE_ALIGNMENT_BYTES = 4096


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class Address(NamedTuple):
    """Where a page lies: opaque outside `pages/` and the catalog's slot accounting."""

    segment: int
    slot: int


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Sizes of every page of one namespace. Equal for all ranks and TP degrees.

    `slice_count`: KV heads of the whole model in this group (MLA: 1).
    `payload_bytes`: content of one slice: all layers of the stage, `chunk_tokens` tokens.
    """

    slice_count: int
    payload_bytes: int
    chunk_tokens: int

    @property
    def padded_payload_bytes(self) -> int:
        """Payload with its zero padding: what the checksum covers."""
        return round_up(self.payload_bytes, SLICE_ALIGNMENT_BYTES)

    @property
    def slice_bytes(self) -> int:
        """Distance between two slices."""
        return HEADER_BYTES + self.padded_payload_bytes

    @property
    def page_bytes(self) -> int:
        return self.slice_count * self.slice_bytes

    def slot_bytes(self, alignment_bytes: int) -> int:
        """Distance between two slots in a segment of a store with this alignment."""
        return round_up(self.page_bytes, alignment_bytes)


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's KV cache on this rank: a strided byte range, as the tensor that arrived says.

    Block `b` (an id as the scheduler gives it) is `kernel_blocks` consecutive kernel blocks from
    `b * kernel_blocks` on. Byte `c` of token `t` of head `h` in kernel block `k` lies at
    `base_address + k*block_stride_bytes + h*head_stride_bytes + t*token_stride_bytes + c`.
    An opaque block (CPU attention packs its blocks) has `block_tokens` 1 and the whole part of a
    head in one block as `content_bytes`. The tensor's owner keeps the memory alive.
    """

    layer: str
    base_address: int
    block_count: int
    kernel_blocks: int
    head_count: int
    block_tokens: int  # tokens in one kernel block that are addressable (1 if opaque)
    content_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int

    @property
    def block_head_bytes(self) -> int:
        """Bytes of one scheduler block for one head."""
        return self.kernel_blocks * self.block_tokens * self.content_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Which slices of each page this rank holds, and whose turn it is to write them.

    `replica_count` consecutive ranks hold the same heads (MLA, or more ranks than KV heads); the
    one with `replica_index == chunk_index % replica_count` writes, so all links share the work.
    """

    first_slice: int
    slice_count: int
    replica_index: int = 0
    replica_count: int = 1

    def writes(self, chunk_index: int) -> bool:
        return chunk_index % self.replica_count == self.replica_index


def default_chunk_tokens(token_slice_bytes: int, block_tokens: int) -> int:
    """Chunk size: smallest power of two of tokens (and multiple of the block) whose slice has
    1 MiB, at most 256 tokens. `token_slice_bytes`: one KV head, all layers of the whole model."""
    tokens = 1
    while tokens * token_slice_bytes < 1 << 20 and tokens < 256:
        tokens *= 2
    return round_up(tokens, block_tokens)
