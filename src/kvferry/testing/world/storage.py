"""What all engines of a world share: the medium of the pages and the catalog, and their faults."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvferry.catalog.base import Swept, Want
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.snapshot import check_invariants
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.metrics import Metrics
from kvferry.offload.space.recovery import recover
from kvferry.pages import header
from kvferry.pages.base import Extent, Outcome, PageStore, Result
from kvferry.pages.buffers import memory_at
from kvferry.pages.facts import Asked
from kvferry.pages.memory import MemoryPages
from kvferry.testing.catalog_faults import CatalogFault, FaultyCatalog, SharedCatalog
from kvferry.testing.clock import Chance
from kvferry.testing.faults import Fault, FaultyPages
from kvferry.testing.guarantees import pushed_below
from kvferry.testing.places import MemoryPlace
from kvferry.testing.world.checks import Failed, SimClock
from kvferry.testing.world.meaning import Meanings
from kvferry.testing.world.shape import Model, Tenancy

PAGE_FAULTS = {
    Fault.SHORT: 0.01,
    Fault.LATE: 0.08,
    Fault.LOST: 0.001,
    Fault.DUPLICATE: 0.02,
    Fault.FLIP_RETURNED: 0.01,
    Fault.FLIP_STORED: 0.02,
    Fault.TORN: 0.02,
    Fault.NO_SPACE: 0.01,
    Fault.IO_ERROR: 0.01,
    Fault.HANG: 0.001,
}
CATALOG_FAULTS = {
    CatalogFault.UNAVAILABLE: 0.02,
    CatalogFault.LATE: 0.01,
    CatalogFault.LOST_REPLY: 0.02,
    CatalogFault.DUPLICATE: 0.05,
    CatalogFault.STALE: 0.05,
}


class Disk(Protocol):
    """What pages of a world lie on, and how processes open it."""

    digest: header.Digest

    def make(self, clock: SimClock, asked: Asked) -> PageStore:
        """A store of one more process, not open."""

    def ended(self, pages: PageStore) -> None:
        """The process that had this store was killed."""

    def addresses(self) -> list[Address]:
        """Where something was written, segment by segment."""

    def page(self, address: Address) -> bytes: ...

    def replace_page(self, address: Address, content: bytes) -> None: ...

    def fill(self) -> None:
        """From now on it has no room."""

    def free(self) -> None: ...

    def calm(self) -> None:
        """No new faults of its own; there is room."""


class MemoryDisk(MemoryPlace):
    """The reference: what is submitted happens in the next poll."""

    def __init__(self, clock: SimClock):
        super().__init__(clock)
        self._plain: MemoryPages | None = None

    def make(self, clock: SimClock, asked: Asked) -> MemoryPages:
        pages = MemoryPages(self.medium, clock, asked)
        self._plain = self._plain or pages
        return pages

    def ended(self, pages: PageStore) -> None:
        """What it had not done never happens."""

    def addresses(self) -> list[Address]:
        segments = self.medium.segments.items()
        return [Address(number, slot) for number, segment in segments for slot in segment.slots]

    def fill(self) -> None:
        self.medium.room_bytes = self._plain.used_bytes()

    def free(self) -> None:
        self.medium.room_bytes = None

    def calm(self) -> None:
        self.free()


class WatchedPages:
    """Around any `PageStore`. Checks each page that was written: what carries a valid key must be
    what the key means. Nobody polls it, or makes files, while an engine schedules."""

    def __init__(self, inner: PageStore, clock: SimClock, meanings: Meanings):
        self.inner = inner
        self._clock = clock
        self._meanings = meanings
        self._writes: dict[tuple[int, int], Extent] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        job = self.inner.submit_writes(extents)
        self._writes.update({(job, index): extent for index, extent in enumerate(extents)})
        return job

    def poll(self) -> list[Result]:
        self._clock.require_background("pages.poll")
        results = self.inner.poll()
        for result in results:
            extent = self._writes.pop((result.job, result.index), None)
            if extent is not None and result.outcome is Outcome.OK:
                self._check(extent)
        return results

    def create_segment(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        self._clock.require_background("pages.create_segment")
        self.inner.create_segment(segment, namespace, geometry)

    def _check(self, extent: Extent) -> None:
        page, geometry = extent.page, extent.geometry
        for position in range(extent.slice_count):
            slice_index = extent.first_slice + position
            expected = self._meanings.payload(page.namespace, page.key, slice_index)
            start = extent.buffer_address + position * geometry.slice_bytes + HEADER_BYTES
            if bytes(memory_at(start, geometry.payload_bytes)) != expected:
                raise Failed(
                    "a", f"wrong page stored: chunk {page.chunk_index} of {page.key.hex()}"
                )


class WatchedCatalog(SharedCatalog):
    """Nobody asks it while an engine schedules. `wronged`: whose guarantees sweeps have broken; to
    raise there would be taken for a failure of the catalog."""

    def __init__(self, make: Callable[[], MemoryCatalog], clock: SimClock):
        super().__init__(make)
        self._sim_clock = clock
        self.wronged: list[bytes] = []

    def __getattr__(self, verb: str) -> Any:
        self._sim_clock.require_background(f"catalog.{verb}")
        return super().__getattr__(verb)

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        before = self.snapshot()
        swept = super().__getattr__("sweep")(wanted, can_grow)
        self.wronged += pushed_below(before, self.snapshot(), wanted, swept)
        return swept


MakeDisk = Callable[[SimClock], Disk]


class Storage:
    """The store of a world. `open_pages` and `open_catalog`: one for each process half."""

    def __init__(
        self,
        model: Model,
        clock: SimClock,
        chance: Chance,
        tenancy: Tenancy,
        make_disk: MakeDisk = MemoryDisk,
    ):
        self._clock = clock
        self._chance = chance
        self._quotas = tenancy.quotas
        self._disk = make_disk(clock)
        self.digest = self._disk.digest
        self._meanings = Meanings(model)
        page_bytes = max(part.geometry.page_bytes for part in model.parts())
        segment_bytes = 4096 + chance.choice([2, 4, 6]) * page_bytes
        self._asked = Asked(tenancy.segment_count * segment_bytes, 4096, segment_bytes)
        self._plain = self._disk.make(clock, self._asked)
        self.facts = self._plain.open()
        self.meanings = self._meanings
        self.catalog = WatchedCatalog(self._make_catalog, clock)
        self.all_pages: list[FaultyPages] = []
        self.all_catalogs: list[FaultyCatalog] = []
        self._saved = self.catalog.save()
        self._old_pages: dict[Address, bytes] = {}

    def _make_catalog(self) -> MemoryCatalog:
        catalog = MemoryCatalog(self._clock, grace_s=0.2)
        facts = self.facts
        catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
        catalog.set_quotas(self._quotas)
        return catalog

    def open_pages(self, late_s_max: float) -> PageStore:
        inner = WatchedPages(self._disk.make(self._clock, self._asked), self._clock, self._meanings)
        pages = FaultyPages(
            inner,
            self._disk,
            self._clock,
            self._chance,
            PAGE_FAULTS,
            late_s_max=late_s_max,
            hang_s=0.1,
        )
        pages.open()
        self.all_pages.append(pages)
        return pages

    def process_ended(self, pages: PageStore) -> None:
        """Killed, with whatever this store of its was doing."""
        self._disk.ended(pages.inner.inner)

    def close(self) -> None:
        """Closes what is still open. Idempotent."""
        for pages in self.all_pages:
            pages.close()
        self._plain.close()

    def open_catalog(self) -> FaultyCatalog:
        catalog = FaultyCatalog(self.catalog, self._clock, self._chance, CATALOG_FAULTS)
        self.all_catalogs.append(catalog)
        return catalog

    # What happens to the storage as a whole

    def lose_catalog(self) -> None:
        """It starts empty, and whoever opens it adopts what the pages say."""
        self.catalog.lose()
        recover(self.catalog, self._plain, self.facts, Metrics())

    def save_catalog(self) -> None:
        self._saved = self.catalog.save()

    def restore_catalog(self) -> None:
        """An old copy comes back."""
        self.catalog.restore(self._saved)
        recover(self.catalog, self._plain, self.facts, Metrics())

    def fill_disk(self) -> None:
        self._disk.fill()

    def damage(self) -> None:
        """One stored page is no more what it was."""
        addresses = self._disk.addresses()
        if not addresses:
            return
        address = self._chance.choice(addresses)
        geometries = {found.segment: found.geometry for found in self._plain.segments()}
        geometry = geometries[address.segment]
        page = bytearray(self._disk.page(address))
        kind = self._chance.choice(["flip", "flip", "zero", "cut", "swap", "replay"])
        if kind == "flip":
            start = self._chance.randrange(geometry.slice_count) * geometry.slice_bytes
            offset = start + HEADER_BYTES + self._chance.randrange(geometry.payload_bytes)
            page[offset : offset + 1] = bytes(byte ^ 1 for byte in page[offset : offset + 1])
        elif kind == "zero":
            page[:] = bytes(len(page))
        elif kind == "cut":
            del page[self._chance.randrange(len(page) + 1) :]
        elif kind == "swap":
            others = [each for each in addresses if each.segment == address.segment]
            other = self._chance.choice(others)
            page[:] = self._disk.page(other)
            self._disk.replace_page(other, self._disk.page(address))
        elif address in self._old_pages:
            page[:] = self._old_pages[address]
        self._old_pages[address] = self._disk.page(address)
        self._disk.replace_page(address, bytes(page))

    def free_disk(self) -> None:
        self._disk.free()

    def calm(self) -> None:
        """No new faults; what hangs goes on."""
        self._disk.calm()
        for pages in self.all_pages:
            pages.rates = {}
            pages.release()
        for catalog in self.all_catalogs:
            catalog.rates = {}

    # Checks

    def check_catalog(self) -> None:
        wrong = check_invariants(self.catalog.snapshot())
        if wrong:
            raise Failed("b", "; ".join(wrong))
        if self.catalog.wronged:
            owners = sorted({owner.hex() for owner in self.catalog.wronged})
            raise Failed("f", f"{owners} were pushed below what they are guaranteed")

    def check_pages(self) -> int:
        """Every slice in the store that proves itself is what its key means. How many there are."""
        count = 0
        geometries = {found.segment: found.geometry for found in self._plain.segments()}
        for address in self._disk.addresses():
            slices = self._proven_slices(self._disk.page(address), geometries[address.segment])
            count += len(slices)
            for index, found, payload in slices:
                expected = self._meanings.payload(found.page.namespace, found.page.key, index)
                if payload != expected:
                    raise Failed("a", f"wrong page at {address}")
        return count

    def _proven_slices(
        self, content: bytes, geometry: PageGeometry
    ) -> Sequence[tuple[int, header.SliceHeader, bytes]]:
        proven = []
        for index in range(geometry.slice_count):
            start = index * geometry.slice_bytes
            block = bytes(content[start : start + HEADER_BYTES])
            padded = bytes(content[start + HEADER_BYTES : start + geometry.slice_bytes])
            if len(padded) < geometry.padded_payload_bytes:
                continue
            found = header.inspect(block, self.digest)
            if isinstance(found, Outcome) or found.slice_index != index:
                continue
            if self.digest(padded) == found.payload_checksum:
                proven.append((index, found, padded[: geometry.payload_bytes]))
        return proven
