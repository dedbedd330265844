"""One lane of one session, made ready: what of a load goes through it in which chunks, where they
land and how they are unloaded. Immutable."""

from dataclasses import dataclass

from kvferry.layout import PageGeometry
from kvferry.transfer.base import Link
from kvferry.transfer.halves import Load, Tables
from kvferry.transfer.landing import Landing
from kvferry.transfer.messages import Cut
from kvferry.transfer.plan import ChunkRead, ChunkWrite, Lane, chunk_reads, chunk_writes
from kvferry.transfer.unload import AnyUnloader


@dataclass(frozen=True, slots=True)
class ReadChannel:
    """We read, from blocks of the source."""

    lane: Lane
    landing: Landing
    target_table: int
    source_table: int
    unloader: AnyUnloader

    def chunks(self, source_tables: Tables, load: Load) -> list[ChunkRead]:
        """Raises UnavailableError if the source lacks a block."""
        return chunk_reads(
            self.lane,
            self.landing.chunk_tokens,
            source_tables[self.lane.source_group],
            load.tables[self.lane.target_group],
            range(load.start_token, load.end_token),
        )

    def drop(self, link: Link) -> None:
        link.drop_table(self.target_table)


@dataclass(frozen=True, slots=True)
class PushChannel:
    """The source writes, pages of a cut."""

    lane: Lane
    cut: Cut
    geometry: PageGeometry
    unloader: AnyUnloader

    def chunks(self, source_tables: Tables, load: Load) -> list[ChunkWrite]:
        """The source knows its own tables."""
        return chunk_writes(
            self.lane,
            self.cut.chunk_tokens,
            load.tables[self.lane.target_group],
            range(load.start_token, load.end_token),
        )

    def drop(self, link: Link) -> None:
        """Nothing was prepared at the link."""


Channel = ReadChannel | PushChannel
