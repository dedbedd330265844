"""From a landing into the engine's blocks: two copies through a page by copiers of `device`, or one
where blocks of both sides hold the same bytes in the same order, or where pages land.

What was read comes here when it is surely what the producer held; pages that a producer wrote are
proven here. Between two copies a chunk is asked once more whether it is still wanted. One thread,
the mover's, except for `order`.
"""

from dataclasses import dataclass
from typing import Protocol

from kvferry.device.base import Copier, Piece
from kvferry.device.staging import Allocate, Staging, host_memory
from kvferry.layout import PageGeometry, Region
from kvferry.transfer.cut import checksums_of
from kvferry.transfer.landing import CopierMaker, Landing
from kvferry.transfer.plan import ChunkRead, ChunkWrite, Lane


class Chunk(Protocol):
    """What is unloaded. `checksums`: of a page's slices, as who wrote it says. `is_torn`: it is not
    what it should be: its load must fail, whatever is in its blocks."""

    read: ChunkRead | ChunkWrite
    slot: int
    checksums: tuple[int, ...]
    is_torn: bool

    @property
    def is_wanted(self) -> bool:
        """False: its blocks must not be written any more."""


@dataclass(frozen=True, slots=True)
class _Copy:
    chunk: Chunk
    page: int


class Unloader:
    """Of one shape of lane. `ordered_step`: the last step in which the engine's thread has told the
    device that scatters may come; blocks of later steps must not be written yet."""

    def __init__(self, landing: Landing, gatherer: Copier, scatterer: Copier, pages: Staging):
        self._landing = landing
        self._gatherer = gatherer
        self._scatterer = scatterer
        self._pages = pages
        self._gathers: dict[int, _Copy] = {}
        self._scatters: dict[int, _Copy] = {}
        self.ordered_step = -1

    def open(self) -> None:
        self._gatherer.open()
        self._scatterer.open()

    def close(self) -> None:
        self._gatherer.close()
        self._scatterer.close()

    def order(self, step: int) -> None:
        """The engine's thread, in each step."""
        self._scatterer.order_scatters()
        self.ordered_step = step

    def begin(self, chunk: Chunk) -> bool:
        """False: no page is free, try again. From True on until `step` has returned it, slot and
        blocks of the chunk are the unloader's."""
        page = self._pages.take_for_load()
        if page is None:
            return False
        piece = self._landing.gather(chunk.read, chunk.slot, page)
        self._gathers[self._gatherer.submit_gather([piece])] = _Copy(chunk, page)
        return True

    def step(self) -> list[Chunk]:
        """Goes on with what the copiers have done. Returns chunks that it is through with."""
        done = []
        for gathered in self._gatherer.poll():
            copy = self._gathers.pop(gathered.job)
            if copy.chunk.is_wanted:
                piece = Piece(copy.chunk.read.blocks, copy.page)
                self._scatters[self._scatterer.submit_scatter([piece])] = copy
            else:
                done.append(self._through(copy))
        scattered = [self._scatters.pop(copy.job) for copy in self._scatterer.poll()]
        return done + [self._through(copy) for copy in scattered]

    def drain(self) -> bool:
        """Instead of `step`, after a failure of whatever kind. True when nothing is left that could
        write to blocks."""
        for scattered in self._scatterer.poll():
            self._scatters.pop(scattered.job)
        return not self._scatters

    def _through(self, copy: _Copy) -> Chunk:
        self._pages.give_back(copy.page)
        return copy.chunk


class StraightUnloader:
    """As `Unloader`, with one copy."""

    def __init__(self, landing: Landing, scatterer: Copier):
        self._landing = landing
        self._scatterer = scatterer
        self._scatters: dict[int, Chunk] = {}
        self.ordered_step = -1

    def open(self) -> None:
        self._scatterer.open()

    def close(self) -> None:
        self._scatterer.close()

    def order(self, step: int) -> None:
        self._scatterer.order_scatters()
        self.ordered_step = step

    def begin(self, chunk: Chunk) -> bool:
        piece = self._landing.row_piece(chunk.read, chunk.slot)
        self._scatters[self._scatterer.submit_scatter([piece])] = chunk
        return True

    def step(self) -> list[Chunk]:
        return [self._scatters.pop(done.job) for done in self._scatterer.poll()]

    def drain(self) -> bool:
        self.step()
        return not self._scatters


class PageUnloader:
    """As `StraightUnloader`, of pages that a producer wrote into host memory. Each is proven before
    it is scattered, and again afterwards: a write of another load that comes late may land in
    between, and no transport says when that cannot be any more."""

    def __init__(self, geometry: PageGeometry, scatterer: Copier):
        self._geometry = geometry
        self._scatterer = scatterer
        self._scatters: dict[int, Chunk] = {}
        self._torn: list[Chunk] = []
        self.ordered_step = -1

    def open(self) -> None:
        self._scatterer.open()

    def close(self) -> None:
        self._scatterer.close()

    def order(self, step: int) -> None:
        self._scatterer.order_scatters()
        self.ordered_step = step

    def begin(self, chunk: Chunk) -> bool:
        if self._is_proven(chunk):
            piece = Piece(chunk.read.blocks, chunk.slot)
            self._scatters[self._scatterer.submit_scatter([piece])] = chunk
        else:
            chunk.is_torn = True
            self._torn.append(chunk)
        return True

    def step(self) -> list[Chunk]:
        through, self._torn = self._torn, []
        for done in self._scatterer.poll():
            chunk = self._scatters.pop(done.job)
            chunk.is_torn = not self._is_proven(chunk)
            through.append(chunk)
        return through

    def drain(self) -> bool:
        self.step()
        return not self._scatters

    def _is_proven(self, chunk: Chunk) -> bool:
        return checksums_of(chunk.slot, self._geometry) == chunk.checksums


AnyUnloader = Unloader | StraightUnloader | PageUnloader


class Unloaders:
    """All of one rank, by the shapes of landing and blocks: few, however many peers there are.
    What the threads share is replaced, never changed.

    `page_bytes`: of the memory for pages, which `allocate` takes. `open` is not needed; `close` is
    idempotent. On a GPU everything goes through pages: its kernels are made for tokens and heads.
    """

    def __init__(self, make_copier: CopierMaker, page_bytes: int, allocate: Allocate = host_memory):
        self._make_copier = make_copier
        self._page_bytes = page_bytes
        self._allocate = allocate
        self._unloaders: dict[tuple, AnyUnloader] = {}
        self._pages: tuple[Staging, ...] = ()

    def of(self, lane: Lane, landing: Landing) -> AnyUnloader:
        rows = landing.rows() if self._allocate is host_memory else ()
        key = landing.regions(), lane.target, landing.geometry, rows
        if key not in self._unloaders:
            unloader = self._straight(landing, rows) if rows else self._through_pages(landing)
            unloader.open()
            self._unloaders = {**self._unloaders, key: unloader}
        return self._unloaders[key]

    def of_pages(self, lane: Lane, geometry: PageGeometry) -> AnyUnloader:
        """Of a lane whose source writes pages."""
        key = "pages", lane.target, geometry
        if key not in self._unloaders:
            unloader = PageUnloader(geometry, self._make_copier(lane.target, geometry))
            unloader.open()
            self._unloaders = {**self._unloaders, key: unloader}
        return self._unloaders[key]

    def order(self, step: int) -> None:
        """The engine's thread, in each step."""
        for unloader in self._unloaders.values():
            unloader.order(step)

    def step(self) -> list[Chunk]:
        return [chunk for unloader in self._unloaders.values() for chunk in unloader.step()]

    def drain(self) -> bool:
        """Only takes what was scattered. True when nothing is being written to blocks any more."""
        return all(unloader.drain() for unloader in self._unloaders.values())

    @property
    def taken_count(self) -> int:
        """Pages in use."""
        return sum(pages.taken_count for pages in self._pages)

    def close(self) -> None:
        for unloader in self._unloaders.values():
            unloader.close()
        for pages in self._pages:
            pages.close()
        self._unloaders, self._pages = {}, ()

    def _straight(self, landing: Landing, rows: tuple[Region, ...]) -> StraightUnloader:
        return StraightUnloader(landing, self._make_copier(rows, landing.row_geometry()))

    def _through_pages(self, landing: Landing) -> Unloader:
        geometry = landing.geometry
        total_bytes = max(self._page_bytes, 2 * geometry.page_bytes)
        pages = Staging(total_bytes, geometry.page_bytes, self._allocate)
        pages.open()
        self._pages += (pages,)
        gatherer = self._make_copier(landing.regions(), geometry)
        return Unloader(landing, gatherer, self._make_copier(landing.lane.target, geometry), pages)
