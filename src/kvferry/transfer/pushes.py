"""What one producer rank writes into consumers' staging: design note 0011.

Life of a page, from its invitation on:

1. WAITING until the tokens that are wanted of it are computed, and a slot of staging is free.
2. GATHERING: a copier brings blocks into the slot. If they were taken from the request meanwhile,
   it waits again.
3. WRITING: the slot is the transport's. The answer travels behind the bytes.
4. ENDED: whoever asks gets the same answer, as long as the lease lives and a while longer.

What is stopped before it is written is never written. A number that is not known cannot have begun:
pages are forgotten only when their lease is over, and without a lease nothing begins.

What the engine's thread says (`begin`, `grow`, `withdraw`, `keep`) and the leases are under the
rank's lock; everything else is the mover's thread's.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvferry.clock import Clock
from kvferry.device.base import SKIP, Copier, Piece
from kvferry.device.staging import Allocate, Staging
from kvferry.errors import IncompatibleError, UnavailableError
from kvferry.layout import PageGeometry
from kvferry.metrics import Metrics
from kvferry.transfer.base import Ending, Indices, Link, PostEnded, Range, Stride
from kvferry.transfer.cut import checksums_of, source_of
from kvferry.transfer.halves import Begin, Hold, Progress, Tables
from kvferry.transfer.landing import CopierMaker
from kvferry.transfer.lease import LeaseBook
from kvferry.transfer.messages import (
    Answer,
    Cut,
    Invite,
    Outcome,
    Place,
    Slots,
    Stop,
    seal_message,
)
from kvferry.transfer.resting import Resting
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import ADDRESS_MAX, COUNT_MAX, RankLayout

GATHERERS_MAX = 64
"""Shapes of pages that readers may ask for: each has a copier."""


class Step(Enum):
    """See the module."""

    WAITING = "waiting"
    GATHERING = "gathering"
    WRITING = "writing"
    ENDED = "ended"


@dataclass(slots=True)
class _Source:
    """One transfer's prefill. The first `computed_tokens` are final in the blocks of `tables`;
    `version` changes when blocks are taken from it. `is_whole`: there will be no others."""

    request_id: str
    key: bytes
    token_count: int
    computed_tokens: int = 0
    tables: Tables = ()
    version: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class _Gatherer:
    """Of one cut of this rank."""

    block_tokens: int
    geometry: PageGeometry
    copier: Copier


@dataclass(slots=True, eq=False)
class _Page:
    """One invitation. `slot`, `version`: from GATHERING on; `answer`: from WRITING on."""

    reader: str
    transfer: bytes
    number: int
    cut: Cut | None = None
    slots: Slots | None = None
    place: Place | None = None
    gatherer: _Gatherer | None = None
    step: Step = Step.WAITING
    is_stopped: bool = False
    slot: int = 0
    version: int = 0
    answer: Answer | None = None


class Pushes:
    """See the module. `open` acquires staging and registers it: nothing else of this rank is ever
    given to the link. `close` is idempotent, after the link's."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        layout: RankLayout,
        make_copier: CopierMaker,
        allocate: Allocate,
        book: LeaseBook,
        lock: threading.Lock,
        send: Callable[[str, Answer], None],
    ):
        """`send`: best effort: who gets no answer asks again."""
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._layout = layout
        self._make_copier = make_copier
        self._book = book
        self._lock = lock
        self._send = send
        self._staging = Staging(settings.staging_bytes, settings.slot_bytes, allocate)
        self._sources: dict[bytes, _Source] = {}
        self._transfers: dict[str, bytes] = {}  # by request
        self._pages: dict[tuple[str, int], _Page] = {}
        self._live: dict[tuple[str, int], _Page] = {}  # those that have not ended
        self._gatherers: Mapping[Cut, _Gatherer] = {}  # replaced, never changed
        self._gathers: dict[tuple[Cut, int], _Page] = {}
        self._writes: dict[int, _Page] = {}
        self._tables: dict[tuple, int] = {}  # of readers and of own staging, by size of page
        self._resting = Resting(self._staging, clock, settings.rest_s)

    def open(self) -> None:
        self._staging.open()
        self._link.register(Range(self._staging.address, self._staging.length_bytes))

    def close(self) -> None:
        gatherers, self._gatherers = self._gatherers, {}
        for gatherer in gatherers.values():
            gatherer.copier.close()
        self._staging.close()

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return not self._staging.taken_count

    # Engine's thread, under the lock

    def begin(self, begun: Begin | Hold) -> None:
        self._sources[begun.transfer] = _Source(begun.request_id, begun.key, begun.token_count)
        self._transfers[begun.request_id] = begun.transfer

    def keep(self, hold: Hold) -> None:
        """The prefill has finished, and its blocks are kept as long as its lease lives."""
        source = self._sources.get(hold.transfer)
        if source is not None:
            source.tables, source.computed_tokens = hold.tables, hold.token_count
            source.is_whole = True

    def grow(self, progress: Progress) -> None:
        """So much is computed, by now."""
        source = self._sources.get(self._transfers.get(progress.request_id, b""))
        if source is not None:
            source.tables = progress.tables
            source.computed_tokens = progress.computed_tokens

    def withdraw(self, request_id: str) -> None:
        """The blocks are others' from now on. What was gathered and not seen is not taken."""
        source = self._sources.get(self._transfers.get(request_id, b""))
        if source is not None:
            source.tables, source.computed_tokens = (), 0
            source.version += 1

    def order(self) -> None:
        """Gathers submitted from now on read what the engine has computed so far."""
        for gatherer in self._gatherers.values():
            gatherer.copier.order_gathers()

    # Mover's thread

    def take(self, body: Invite | Stop) -> None:
        if isinstance(body, Stop):
            for number in body.numbers:
                self._stop(body, number)
            return
        for place in body.places:
            page = self._pages.get((body.sender, place.number))
            if page is None:
                self._invited(body, place)
            elif page.step is Step.ENDED:
                self._send(page.reader, page.answer)

    def step(self) -> bool:
        """One round. True if anything moved."""
        self._resting.step()
        moved = False
        for cut, gatherer in self._gatherers.items():
            for done in gatherer.copier.poll():
                self._gathered(self._gathers.pop((cut, done.job)))
                moved = True
        busy = Counter(page.reader for page in self._live.values() if page.slot)
        for page in list(self._live.values()):
            if page.step is Step.WAITING:
                moved = self._begin_gather(page, busy) or moved
        self._forget_what_is_over()
        return moved

    def post_ended(self, event: PostEnded) -> None:
        page = self._writes.pop(event.post)
        self._metrics.count("kvferry_transfer_writes_total", outcome=event.ending.value)
        if event.ending is Ending.DONE:
            size_bytes = page.gatherer.geometry.page_bytes
            self._metrics.count("kvferry_transfer_written_bytes_total", size_bytes)
            self._free(page)
            self._close(page)
        elif event.ending is Ending.LOST:
            self._resting.add(page.slot)
            page.slot = 0
            self._end(page, Outcome.LOST)
        else:
            self._free(page)
            self._end(page, Outcome.NOT_WRITTEN)

    def may_forget(self, reader: str) -> bool:
        """Nothing is being written to it. Then its tables are not used any more."""
        if any(page.reader == reader for page in self._writes.values()):
            return False
        self._tables = {key: table for key, table in self._tables.items() if key[0] != reader}
        return True

    def _invited(self, invite: Invite, place: Place) -> None:
        with self._lock:
            source = self._live_source(invite.transfer)
        page = _Page(invite.sender, invite.transfer, place.number, invite.cut, invite.slots, place)
        if source is not None:
            self._pages[page.reader, page.number] = page
        if source is not None and self._is_sound(page, source, invite.key):
            self._live[page.reader, page.number] = page
        else:
            self._end(page, Outcome.NOT_WRITTEN)

    def _stop(self, stop: Stop, number: int) -> None:
        page = self._pages.get((stop.sender, number))
        if page is None:
            page = _Page(stop.sender, stop.transfer, number)
            with self._lock:
                is_live = self._live_source(stop.transfer) is not None
            if is_live:  # its invitation may still be on the way
                self._pages[page.reader, page.number] = page
        page.is_stopped = True
        if page.step is Step.ENDED:
            self._send(page.reader, page.answer)
        elif page.step is Step.WAITING:
            self._end(page, Outcome.NOT_WRITTEN)

    def _live_source(self, transfer: bytes) -> _Source | None:
        """Under the lock."""
        return self._sources.get(transfer) if self._book.holds(transfer) else None

    def _is_sound(self, page: _Page, source: _Source, key: bytes) -> bool:
        """Whether a page can be written at all, and may be."""
        cut, slots, place = page.cut, page.slots, page.place
        page.gatherer = self._gatherer(cut)
        start = place.chunk * cut.chunk_tokens
        return (
            key == source.key
            and page.gatherer is not None
            and 0 <= place.slot < slots.count < COUNT_MAX
            and page.gatherer.geometry.page_bytes <= slots.slot_bytes < COUNT_MAX << 16
            and 0 < slots.address < ADDRESS_MAX
            and 0 <= start <= place.start_token < place.end_token <= start + cut.chunk_tokens
            and place.end_token <= source.token_count
        )

    def _gatherer(self, cut: Cut) -> _Gatherer | None:
        """None: there is nothing of the kind, or its pages are larger than our slots."""
        found = self._gatherers.get(cut)
        if found is None and len(self._gatherers) < GATHERERS_MAX:
            try:
                group, regions, geometry = source_of(self._layout, cut)
            except IncompatibleError:
                return None
            if geometry.page_bytes > self._staging.slot_bytes:
                return None
            found = _Gatherer(group.block_tokens, geometry, self._make_copier(regions, geometry))
            found.copier.open()
            self._gatherers = {**self._gatherers, cut: found}
        return found

    def _begin_gather(self, page: _Page, busy: Counter[str]) -> bool:
        """`busy`: slots by reader. One has at most half of them: it may stand still."""
        with self._lock:
            source = self._live_source(page.transfer)
            blocks = _blocks(source, page) if source is not None else ()
            page.version = source.version if source is not None else 0
        if blocks == ():
            self._end(page, Outcome.NOT_WRITTEN)
            return True
        if blocks is None or busy[page.reader] >= max(1, self._staging.slot_count // 2):
            return False
        slot = self._staging.take_for_load()
        if slot is None:
            return False
        busy[page.reader] += 1
        page.slot, page.step = slot, Step.GATHERING
        job = page.gatherer.copier.submit_gather([Piece(blocks, slot)])
        self._gathers[page.cut, job] = page
        return True

    def _gathered(self, page: _Page) -> None:
        """Blocks are taken from a request before anything else is computed in them: if they are
        still its own now, they were when they were read."""
        with self._lock:
            source = self._live_source(page.transfer)
            is_good = source is not None and source.version == page.version
        if is_good and not page.is_stopped:
            self._write(page)
            return
        self._free(page)
        page.step = Step.WAITING
        if page.is_stopped:
            self._end(page, Outcome.NOT_WRITTEN)

    def _write(self, page: _Page) -> None:
        geometry = page.gatherer.geometry
        try:
            target = self._table(page.reader, geometry.page_bytes, page.slots)
            source = self._table(None, geometry.page_bytes, self._own_slots)
        except (IncompatibleError, UnavailableError):
            self._free(page)
            self._end(page, Outcome.NOT_WRITTEN)
            return
        index = (page.slot - self._staging.address) // self._staging.slot_bytes
        checksums = checksums_of(page.slot, geometry)
        page.answer = Answer(page.number, Outcome.WRITTEN, checksums)
        page.step = Step.WRITING
        post = self._link.post(
            page.reader,
            target,
            Indices("i", [page.place.slot]),
            source,
            Indices("i", [index]),
            seal_message(self._settings.secret, page.reader, page.answer),
        )
        self._writes[post] = page

    @property
    def _own_slots(self) -> Slots:
        staging = self._staging
        return Slots(staging.address, staging.slot_bytes, staging.slot_count)

    def _table(self, peer: str | None, page_bytes: int, slots: Slots) -> int:
        """Of one page in each slot. IncompatibleError for a range that was not described,
        UnavailableError for a reader that is not connected."""
        key = peer, page_bytes, slots
        if key not in self._tables:
            stride = Stride(slots.address, page_bytes, slots.slot_bytes, slots.count)
            self._tables[key] = self._link.table(peer, [stride])
        return self._tables[key]

    def _end(self, page: _Page, outcome: Outcome) -> None:
        page.answer = Answer(page.number, outcome)
        self._close(page)
        self._send(page.reader, page.answer)

    def _close(self, page: _Page) -> None:
        page.step = Step.ENDED
        self._live.pop((page.reader, page.number), None)

    def _free(self, page: _Page) -> None:
        self._staging.give_back(page.slot)
        page.slot = 0

    def _forget_what_is_over(self) -> None:
        """Sources without a lease, when nothing of theirs is under way."""
        with self._lock:
            over = {name for name in self._sources if not self._book.holds(name)}
            over -= {page.transfer for page in self._live.values()}
            for transfer in over:
                source = self._sources.pop(transfer)
                self._transfers.pop(source.request_id, None)
        if over:
            self._pages = {k: page for k, page in self._pages.items() if page.transfer not in over}


def _blocks(source: _Source, page: _Page) -> tuple[int, ...] | None:
    """The blocks of a page's chunk; None: not yet; (): never. Where there is none, or none is
    wanted, another one stands for it."""
    width, place = page.gatherer.block_tokens, page.place
    table = source.tables[page.cut.group] if page.cut.group < len(source.tables) else ()
    wanted = range(place.start_token // width, -(-place.end_token // width))
    if source.computed_tokens < place.end_token or len(table) < wanted.stop:
        return () if source.is_whole else None
    if any(table[index] == SKIP for index in wanted):
        return () if source.is_whole else None
    first = place.chunk * page.cut.chunk_tokens // width
    chunk = range(first, first + page.cut.chunk_tokens // width)
    return tuple(table[index if index in wanted else wanted[0]] for index in chunk)
