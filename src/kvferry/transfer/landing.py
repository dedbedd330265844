"""Where a lane's units land in staging, and how they get from there into the engine's blocks.

Staging is cut into slots; a chunk takes one. Inside it units lie as the source has them, layer by
layer (or unit by unit where the source packs all layers of a block together), so that neighbours
there are neighbours here and become one descriptor. To a copier a landing is one more KV cache:
gathered into a page, it can be scattered into blocks of any other layout. Where blocks of both
sides hold the same bytes in the same order, the landing itself is taken for a page.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.device.base import SKIP, Copier, Piece
from kvferry.errors import ConfigError
from kvferry.layout import HEADER_BYTES, PageGeometry, Region
from kvferry.transfer.base import Indices, Range, Stride
from kvferry.transfer.plan import ChunkRead, Lane, cell_of, is_packed

CHUNK_TOKENS_MAX = 4096

CopierMaker = Callable[[Sequence[Region], PageGeometry], Copier]
"""Makes a copier that is not open yet."""


class Landing:
    """The places of one lane in staging. Immutable. `slot_bytes`: of each slot of `memory`."""

    def __init__(self, lane: Lane, memory: Range, slot_bytes: int):
        """Raises ConfigError if not even the smallest chunk fits a slot."""
        self.lane = lane
        self._memory = memory
        cell_bytes, layer_count = lane.cell.cell_bytes, len(lane.source)
        self._step_bytes = cell_bytes * (layer_count if lane.is_packed else 1)
        step_units = lane.step_tokens // lane.unit_tokens
        room_units = (slot_bytes - self._step_bytes + 1) // (cell_bytes * layer_count)
        most = min(room_units, max(CHUNK_TOKENS_MAX // lane.unit_tokens, step_units))
        self._chunk_units = most // step_units * step_units
        if self._chunk_units < 1:
            needed = step_units * cell_bytes * layer_count + self._step_bytes
            raise ConfigError(
                "transfer.slot_bytes",
                f"slot_bytes={slot_bytes} is too small for one block of this model: set it to at"
                f" least {needed}",
                key="slot_bytes",
            )
        self._row_bytes = cell_bytes * layer_count
        self._layer_bytes = cell_bytes if lane.is_packed else cell_bytes * self._chunk_units
        last_layer = (layer_count - 1) * self._layer_bytes
        taken = last_layer if not lane.is_packed else 0
        self._place_count = (memory.length_bytes - taken) // self._step_bytes

    @property
    def chunk_tokens(self) -> int:
        return self._chunk_units * self.lane.unit_tokens

    @property
    def geometry(self) -> PageGeometry:
        """Of the page that a chunk becomes."""
        token_bytes = sum(r.block_tokens * r.content_bytes for r in self.lane.source)
        return PageGeometry(
            self.lane.head_count, self._chunk_units * token_bytes, self.chunk_tokens
        )

    def strides(self) -> list[Stride]:
        """The table of own memory, in the order of `Lane.source_strides`."""
        step, count, start = self._step_bytes, self._place_count, self._memory.address
        if self.lane.is_packed:
            return [Stride(start, step, step, count)]
        piece = self.lane.cell.piece_bytes
        return [
            Stride(start + layer * self._layer_bytes + index * piece, piece, step, count)
            for layer in range(len(self.lane.source))
            for index in range(len(self.lane.cell.offsets))
        ]

    def regions(self) -> tuple[Region, ...]:
        """Landed units as a copier sees them: block `p` is place `p`."""
        cell = self.lane.cell
        return tuple(
            replace(
                region,
                base_address=self._memory.address + index * self._layer_bytes,
                block_count=self._place_count,
                kernel_blocks=1,
                block_stride_bytes=self._step_bytes,
                head_stride_bytes=cell.head_stride_bytes,
                token_stride_bytes=cell.token_stride_bytes,
            )
            for index, region in enumerate(self.lane.source)
        )

    def rows(self) -> tuple[Region, ...]:
        """The target's blocks as rows of bytes that lie in them as they land: all layers of a block
        if both sides pack them, else one layer. () if anything differs."""
        lane, cell = self.lane, self.lane.cell
        first = lane.target[0]
        wanted_bytes = first.content_bytes * first.head_count * first.block_tokens
        is_same = (
            cell.cell_bytes == cell.piece_bytes == wanted_bytes
            and first.kernel_blocks == 1
            and lane.unit_tokens == lane.target_block_tokens
            and all(cell_of(region) == cell for region in lane.target)
        )
        if not is_same or (lane.is_packed and not is_packed(lane.target)):
            return ()
        row_bytes = self._step_bytes
        return tuple(
            replace(
                region,
                head_count=1,
                block_tokens=1,
                content_bytes=row_bytes,
                head_stride_bytes=row_bytes,
                token_stride_bytes=row_bytes,
            )
            for region in (lane.target[:1] if lane.is_packed else lane.target)
        )

    def row_geometry(self) -> PageGeometry:
        """Of a chunk whose landing is taken for a page of `rows`."""
        return PageGeometry(1, self._chunk_units * self._row_bytes, self.chunk_tokens)

    def row_piece(self, read: ChunkRead, slot_address: int) -> Piece:
        """From the landing straight into the blocks."""
        blocks = [block for block in read.blocks if block != SKIP]
        blocks += [SKIP] * (self._chunk_units - len(blocks))
        landed = self._memory.address + self.first_place(slot_address) * self._step_bytes
        return Piece(tuple(blocks), landed - HEADER_BYTES)

    def first_place(self, slot_address: int) -> int:
        return -(-(slot_address - self._memory.address) // self._step_bytes)

    def indices(self, read: ChunkRead, slot_address: int) -> tuple[Indices, Indices]:
        """Target and source indices of one chunk, runs of neighbours kept together."""
        first, count = self.first_place(slot_address), len(read.units)
        target, source = Indices("i"), Indices("i")
        for number in range(len(self.lane.source_strides())):
            base = number * self._place_count + first
            target.extend(range(base, base + count))
            source.extend([number * self.lane.unit_count + unit for unit in read.units])
        return target, source

    def read_bytes(self, read: ChunkRead) -> int:
        return len(read.units) * len(self.lane.source) * self.lane.cell.cell_bytes

    def gather(self, read: ChunkRead, slot_address: int, page_address: int) -> Piece:
        """From the landing into a page."""
        first = self.first_place(slot_address)
        return Piece(tuple(first + place for place in read.places), page_address)
