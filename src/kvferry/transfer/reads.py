"""Reads of one consumer rank that pulls, and the staging they land in.

A read cannot be called back. One whose load has failed keeps its slot in *quarantine* until it has
ended, however long that takes; after one that was lost the slot *rests* for a while, since that
proves nothing about its last bytes. What is out of use so is capped: beyond it nothing new begins.
One thread: the mover's.
"""

from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.device.staging import Staging
from kvferry.metrics import Metrics
from kvferry.transfer.base import Ending, Link, PostEnded, Range
from kvferry.transfer.channel import Channel
from kvferry.transfer.halves import Load
from kvferry.transfer.params import Offer
from kvferry.transfer.plan import ChunkRead, ChunkWrite
from kvferry.transfer.resting import Resting
from kvferry.transfer.session import Peers, Session
from kvferry.transfer.settings import Settings


@dataclass(slots=True, eq=False)
class LoadJob:
    """One request's load. `failure`: why it fails; nothing of it is scattered from then on.
    `left_count`: chunks that are not in the blocks, None until it is known which there are."""

    load: Load
    deadline_s: float
    step: int
    failure: str = ""
    left_count: int | None = None
    unloading_count: int = 0

    @property
    def is_over(self) -> bool:
        return self.unloading_count == 0 and (bool(self.failure) or self.left_count == 0)


@dataclass(slots=True, eq=False)
class ChunkJob:
    """One chunk of it through one channel. `posted_s`: when its read began; `ended_s`: when it was
    seen to have ended; `ended_serial`: the last claim that had been sent by then. `checksums`,
    `is_torn`: of a page, see `unload.Chunk`."""

    job: LoadJob
    offer: Offer
    session: Session
    channel: Channel
    read: ChunkRead | ChunkWrite
    slot: int = 0
    checksums: tuple[int, ...] = ()
    is_torn: bool = False
    posted_s: float = 0.0
    ended_s: float = 0.0
    ended_serial: int = 0

    @property
    def is_wanted(self) -> bool:
        return not self.job.failure


class Reads:
    """See the module. `staging`: the caller opens, registers and closes it."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        peers: Peers,
        staging: Staging,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._peers = peers
        self._staging = staging
        self._out: dict[int, ChunkJob] = {}
        self._resting = Resting(staging, clock, settings.rest_s)

    def open(self, description: bytes) -> None:
        """Sources need not know of reads."""

    @property
    def memory(self) -> Range:
        return Range(self._staging.address, self._staging.length_bytes)

    @property
    def out_count(self) -> int:
        return len(self._out)

    @property
    def given_up_count(self) -> int:
        """Reads that are out and that nobody waits for. Any thread: the engine's asks as well
        while the mover posts, so what is counted is a copy, made at once."""
        return sum(not chunk.is_wanted for chunk in list(self._out.values()))

    @property
    def quarantine_bytes(self) -> int:
        return (self.given_up_count + len(self._resting)) * self._staging.slot_bytes

    @property
    def is_full(self) -> bool:
        return self.quarantine_bytes > self._settings.quarantine_bytes_max

    def post(self, chunk: ChunkJob) -> bool:
        """Begins a chunk's read. False if no slot is free."""
        slot = self._staging.take_for_load()
        if slot is None:
            return False
        chunk.slot = slot
        session, channel = chunk.session, chunk.channel
        targets, sources = channel.landing.indices(chunk.read, slot)
        chunk.posted_s = self._clock.now_s()
        number = self._link.post(
            session.name, channel.target_table, targets, channel.source_table, sources
        )
        post_s = self._clock.now_s() - chunk.posted_s
        metrics, peer = self._metrics, session.address
        metrics.observe("kvferry_transfer_post_seconds", post_s, peer=peer)
        metrics.observe("kvferry_transfer_read_descriptors", len(targets), peer=peer)
        metrics.count("kvferry_transfer_descriptors_total", len(targets))
        metrics.count("kvferry_transfer_transport_reads_total", transport=self._link.transport)
        session.reads_out += 1
        self._out[number] = chunk
        return True

    def take(self, event: PostEnded) -> ChunkJob | None:
        """A read has ended. Returns its chunk if it brought something that somebody wants: the slot
        is the caller's then. A chunk that brought nothing fails its load."""
        chunk = self._out.pop(event.post)
        chunk.session.reads_out -= 1
        chunk.ended_s = self._clock.now_s()
        self._metrics.count("kvferry_transfer_reads_total", outcome=event.ending.value)
        if event.ending is Ending.DONE:
            size_bytes = chunk.channel.landing.read_bytes(chunk.read)
            self._metrics.count("kvferry_transfer_read_bytes_total", size_bytes)
            read_s, peer = chunk.ended_s - chunk.posted_s, chunk.session.address
            self._metrics.observe("kvferry_transfer_read_seconds", read_s, peer=peer)
            self._metrics.observe("kvferry_transfer_read_size_bytes", size_bytes, peer=peer)
        if event.ending is Ending.LOST:
            self._peers.lose(chunk.session)
            self._resting.add(chunk.slot)
        elif event.ending is Ending.DONE and chunk.is_wanted:
            return chunk
        else:
            self._staging.give_back(chunk.slot)
        if chunk.is_wanted:
            chunk.job.failure = event.ending.value
        return None

    def give_back(self, chunk: ChunkJob) -> None:
        """Nothing reads from or writes to the chunk's slot any more."""
        self._staging.give_back(chunk.slot)

    def step(self) -> list[ChunkJob]:
        """Returns chunks that cannot come any more: of reads, `take` says so."""
        self._resting.step()
        self._metrics.set("kvferry_transfer_quarantine_bytes", self.quarantine_bytes)
        return []
