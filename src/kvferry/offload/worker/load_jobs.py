"""Loads of one rank: read into staging, verify, scatter, report. One job for one request.

Life of a load:

1. WAITING: planned. Its chunks are read as staging slots become free, in order.
2. A chunk that was read and verified is scattered at once. One that fails ends the reading of
   what follows it: vLLM recomputes from there on. Where the copier proves pages, the page store
   verifies headers only, and a payload that is damaged comes back from the scatter as failed.
3. ENDED: nothing of it is being scattered any more and nothing will be; it is reported once. A
   load past its deadline ends as soon as nothing of it is being scattered; reads that are still
   out keep their staging slots until the page store returns them, and are then ignored.

The engine's thread adds and collects, the mover's thread does the rest: all state is under
`_lock`, which nobody holds while bytes move. What the copiers have done is taken by either.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.clock import Clock
from kvferry.device.base import Copier, Done, Piece
from kvferry.device.staging import Staging
from kvferry.metrics import Metrics
from kvferry.offload.base import Chunk, Load
from kvferry.offload.chunks import blocks_to_load
from kvferry.offload.worker.ranks import RankPart
from kvferry.pages.base import Extent, Outcome, PageStore, Result

BAD_PAGE = {Outcome.ABSENT, Outcome.FOREIGN, Outcome.CORRUPT, Outcome.SHORT}
"""Outcomes that say that this page will not become readable again."""


@dataclass(slots=True, eq=False)
class Piecework:
    """One chunk of one load. `checksums`: what its slices should have, if the copier is to say."""

    load: "LoadJob"
    part: RankPart
    chunk: Chunk
    blocks: tuple[int, ...]
    staging_address: int = 0
    checksums: tuple[int, ...] | None = None
    is_scattering: bool = False
    is_closed: bool = False
    is_loaded: bool = False


@dataclass(slots=True, eq=False)
class LoadJob:
    """`failed_from`: by place of the part, the first chunk that failed. `is_void`: all of it."""

    load: Load
    deadline_s: float
    started_s: float
    pieces: list[Piecework] = field(default_factory=list)
    open_count: int = 0
    failed_from: dict[tuple[int, int], int] = field(default_factory=dict)
    is_void: bool = False

    @property
    def has_failed(self) -> bool:
        return self.is_void or bool(self.failed_from)

    def failed_blocks(self) -> set[int]:
        """Blocks of the failed chunks and of all later ones of the same part."""
        return {
            block
            for piece in self.pieces
            if self.is_void or self._is_lost(piece)
            for block in piece.blocks
            if block >= 0
        }

    def _is_lost(self, piece: Piecework) -> bool:
        failed_from = self.failed_from.get(piece.part.place)
        return failed_from is not None and piece.chunk.chunk_index >= failed_from


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page that a load could not use. `is_gone`: evict it."""

    namespace: bytes
    key: bytes
    generation: bytes
    is_gone: bool

    @classmethod
    def of(cls, piece: Piecework, *, is_gone: bool) -> "BadPage":
        return cls(piece.part.namespace, piece.chunk.key, piece.chunk.generation, is_gone)


class LoadJobs:
    """See the module. `progress` is set whenever a load ends. `reads_max`: so many reads are out
    at most, however much staging there is: what is young is still in the processor's cache."""

    def __init__(
        self, pages: PageStore, staging: Staging, clock: Clock, metrics: Metrics, reads_max: int
    ):
        self._pages = pages
        self._staging = staging
        self._clock = clock
        self._metrics = metrics
        self._reads_max = reads_max
        self._lock = threading.Lock()
        self._active: dict[str, LoadJob] = {}
        self._queue: deque[Piecework] = deque()
        self._reads: dict[tuple[int, int], Piecework] = {}
        self._scatters: dict[tuple[Copier, int], list[Piecework]] = {}
        self._ended: list[LoadJob] = []
        self._bad_pages: list[BadPage] = []
        self._busy_since_s: float | None = None
        self._busy_s = 0.0
        self.progress = threading.Event()

    # Engine's thread

    def add(self, parts: Sequence[RankPart | None], load: Load) -> None:
        """`parts`: by part index, None for those of other stages."""
        now_s = self._clock.now_s()
        job = LoadJob(load, now_s + load.deadline_s, now_s)
        for span in load.spans:
            part = parts[span.part_index]
            if part is not None:
                job.pieces += self._pieces(job, part, span.chunks())
        job.open_count = len(job.pieces)
        with self._lock:
            if self._busy_since_s is None:
                self._busy_since_s = now_s
            self._active[load.request_id] = job
            self._queue.extend(job.pieces)
            self._end_if_done(job)

    def _pieces(self, job: LoadJob, part: RankPart, chunks: Iterable[Chunk]) -> list[Piecework]:
        load, facts, pieces = job.load, part.local.part, []
        for chunk in chunks:
            blocks = blocks_to_load(
                facts, chunk.blocks, chunk.chunk_index, load.start_token, load.end_token
            )
            pieces.append(Piecework(job, part, chunk, blocks))
        return pieces

    def collect(self) -> tuple[list[LoadJob], list[BadPage]]:
        """Loads that have ended, each once, after the deadline has been looked at; and the pages
        that failed so far."""
        now_s = self._clock.now_s()
        with self._lock:
            for job in list(self._active.values()):
                if now_s > job.deadline_s:
                    self._fail_open(job, "late")
            ended, self._ended = self._ended, []
            bad_pages, self._bad_pages = self._bad_pages, []
            self.progress.clear()
        return ended, bad_pages

    def take_busy_s(self) -> float:
        """Time since the last call during which at least one load was under way."""
        with self._lock:
            self._add_busy()
            busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def void_all(self) -> None:
        """The weights have changed: every load under way fails as a whole, as soon as nothing of
        it is being scattered. So do those that nobody collected."""
        with self._lock:
            for job in self._ended:
                job.is_void = True
            for job in list(self._active.values()):
                job.is_void = True
                self._fail_open(job, "reset")

    @property
    def pending_count(self) -> int:
        with self._lock:
            return len(self._active) + len(self._reads)

    # Mover's thread

    def advance(self) -> bool:
        """Starts the reads for which there is staging. True if there were any."""
        with self._lock:
            batch = self._next_batch()
        if not batch:
            return False
        extents: list[Extent] = [
            piece.part.extent(piece.chunk, piece.staging_address) for piece in batch
        ]
        number = self._pages.submit_reads(extents)
        with self._lock:
            self._reads.update({(number, index): piece for index, piece in enumerate(batch)})
        return True

    def read(self, results: Sequence[Result]) -> None:
        """Takes the results of reads; those of others are ignored. Scatters what is good."""
        with self._lock:
            good = [piece for result in results for piece in self._take(result)]
        if good:
            self._scatter(good)

    def _scatter(self, pieces: list[Piecework]) -> None:
        by_copier: dict[Copier, list[Piecework]] = {}
        for piece in pieces:
            by_copier.setdefault(piece.part.copier, []).append(piece)
        for copier, mine in by_copier.items():
            number = None
            copies = [Piece(piece.blocks, piece.staging_address, piece.checksums) for piece in mine]
            with self._lock:
                try:
                    number = copier.submit_scatter(copies)
                    self._scatters[copier, number] = mine
                finally:
                    for piece in mine:  # one that nobody scatters can fail with its load
                        piece.is_scattering = number is not None

    def scattered(self, copier: Copier, copy: Done) -> None:
        """Takes a scatter that the copier has returned. Any thread."""
        with self._lock:
            for index, piece in enumerate(self._scatters.pop((copier, copy.job))):
                self._staging.give_back(piece.staging_address)
                if index in copy.failed:
                    self._fail(piece, Outcome.CORRUPT)
                else:
                    self._scattered(piece)

    @property
    def is_reading(self) -> bool:
        return bool(self._reads)

    @property
    def is_scattering(self) -> bool:
        return bool(self._scatters)

    # Under the lock

    def _next_batch(self) -> list[Piecework]:
        batch: list[Piecework] = []
        while self._queue and len(self._reads) + len(batch) < self._reads_max:
            piece = self._queue[0]
            if piece.is_closed or self._is_useless(piece):
                self._queue.popleft()
                self._close(piece)
                continue
            address = self._staging.take_for_load()
            if address is None:
                break
            piece.staging_address = address
            batch.append(self._queue.popleft())
        return batch

    def _is_useless(self, piece: Piecework) -> bool:
        failed_from = piece.load.failed_from.get(piece.part.place)
        return failed_from is not None and piece.chunk.chunk_index > failed_from

    def _take(self, result: Result) -> list[Piecework]:
        piece = self._reads.pop((result.job, result.index), None)
        if piece is None:
            return []
        if piece.is_closed:
            self._staging.give_back(piece.staging_address)
            return []
        if result.outcome is not Outcome.OK:
            self._staging.give_back(piece.staging_address)
            self._fail(piece, result.outcome)
            return []
        if piece.part.copier.proves_pages:
            piece.checksums = result.checksums
        piece.is_scattering = True
        return [piece]

    def _scattered(self, piece: Piecework) -> None:
        piece.is_loaded = True
        self._metrics.count("kvferry_load_bytes_total", piece.part.extent_bytes)
        self._close(piece)

    def _fail(self, piece: Piecework, outcome: Outcome) -> None:
        self._metrics.count("kvferry_load_failures_total", reason=outcome.value)
        self._bad_pages.append(BadPage.of(piece, is_gone=outcome in BAD_PAGE))
        self._note_failure(piece)
        self._close(piece)

    def _note_failure(self, piece: Piecework) -> None:
        failed_from = piece.load.failed_from
        place = piece.part.place
        failed_from[place] = min(failed_from.get(place, 1 << 60), piece.chunk.chunk_index)

    def _fail_open(self, job: LoadJob, reason: str) -> None:
        """Fails all of a load that is not being scattered; it ends when that is done. Pages that
        were late are not bad, but not offered for a while either."""
        for piece in job.pieces:
            if not (piece.is_closed or piece.is_scattering):
                self._metrics.count("kvferry_load_failures_total", reason=reason)
                self._note_failure(piece)
                if reason == "late":
                    self._bad_pages.append(BadPage.of(piece, is_gone=False))
                self._close(piece)

    def _close(self, piece: Piecework) -> None:
        if not piece.is_closed:
            piece.is_closed = True
            piece.load.open_count -= 1
            self._end_if_done(piece.load)

    def _end_if_done(self, job: LoadJob) -> None:
        if job.open_count == 0:
            del self._active[job.load.request_id]
            self._ended.append(job)
            self._add_busy()
            self.progress.set()

    def _add_busy(self) -> None:
        now_s = self._clock.now_s()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._active else None
