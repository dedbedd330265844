"""The bytes of one rank's blocks: real memory, laid out in one of the ways that engines have."""

from kvferry.layout import Placement, Region
from kvferry.testing.clock import Chance
from kvferry.testing.staging import Buffer
from kvferry.testing.world.shape import CONTENT_BYTES, Group


class PartMemory:
    """All layers of one part on one rank. A block's part of a head is 16 opaque bytes."""

    def __init__(self, group: Group, placement: Placement, block_count: int, chance: Chance):
        self._head_bytes = group.layer_count * CONTENT_BYTES
        self._first_head = placement.first_slice
        self._head_count = placement.slice_count
        gap_bytes = chance.choice([0, 8])
        if chance.random() < 0.5:
            self._head_stride = CONTENT_BYTES + gap_bytes
            self._block_stride = self._head_stride * self._head_count
        else:
            self._block_stride = CONTENT_BYTES + gap_bytes
            self._head_stride = self._block_stride * block_count
        size_bytes = (CONTENT_BYTES + gap_bytes) * self._head_count * block_count
        self._layers = [Buffer(size_bytes) for _ in range(group.layer_count)]
        self._block_count = block_count

    def regions(self) -> tuple[Region, ...]:
        """As the adapter describes them."""
        return tuple(
            Region(
                layer=f"layer {number}",
                base_address=buffer.address,
                block_count=self._block_count,
                kernel_blocks=1,
                head_count=self._head_count,
                block_tokens=1,
                content_bytes=CONTENT_BYTES,
                block_stride_bytes=self._block_stride,
                head_stride_bytes=self._head_stride,
                token_stride_bytes=CONTENT_BYTES,
            )
            for number, buffer in enumerate(self._layers)
        )

    def share(self, content: bytes) -> bytes:
        """This rank's heads of what a block holds on all ranks."""
        start = self._first_head * self._head_bytes
        return content[start : start + self._head_count * self._head_bytes]

    def write(self, block: int, content: bytes) -> None:
        """`content`: of all heads of the model."""
        rest = self.share(content)
        for at, buffer in self._places(block):
            buffer.view[at : at + CONTENT_BYTES] = rest[:CONTENT_BYTES]
            rest = rest[CONTENT_BYTES:]

    def read(self, block: int) -> bytes:
        """This rank's heads of a block."""
        places = self._places(block)
        return b"".join(bytes(buffer.view[at : at + CONTENT_BYTES]) for at, buffer in places)

    def _places(self, block: int) -> list[tuple[int, Buffer]]:
        start = block * self._block_stride
        return [
            (start + head * self._head_stride, buffer)
            for head in range(self._head_count)
            for buffer in self._layers
        ]
