"""One store on disk, as a test sees it: how engines are told to use it, and what lies in it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.catalog.base import CatalogStats, SpaceStats
from kvferry.cli.opened import open_store
from kvferry.config import Config, decode
from kvferry.device.staging import Staging
from kvferry.layout import HEADER_BYTES, PageGeometry
from kvferry.pages.base import Extent, FoundPage, Outcome, PageId, PageStore
from kvferry.pages.buffers import memory_at
from tests.e2e.engine import EngineProcess, connector

CHUNK_TOKENS = 64
CAPACITY_BYTES = 256 << 20
PATIENCE_S = 60.0
UNHURRIED = {"lookup_deadline_s": 10.0, "store_deadline_s": 120.0, "reservation_lease_s": 300.0}
"""Exact counts must not depend on how busy the machine is; tests of deadlines set their own."""
SEGMENT_BYTES_MIN = 1 << 20
BOOKKEEPING_BYTES = 16 << 10
"""Superblock and owner file, a block each, and one that is being replaced: beside the budget."""


class Store:
    """Below `folder`. Stores end in the background, so whoever wants to see them waits."""

    def __init__(self, folder: Path):
        self.pages = folder / "pages"
        self.further: list[Path] = []  # roots
        self.catalog_url = f"lmdb://{folder / 'catalog'}"

    def settings(self, **extra: Any) -> dict[str, Any]:
        """`LLM` arguments of an engine that uses this store."""
        options = {
            "pages": self._roots,
            "catalog": self.catalog_url,
            "capacity_bytes": CAPACITY_BYTES,
            "chunk_tokens": CHUNK_TOKENS,
            **UNHURRIED,
        }
        return {"kv_transfer_config": connector(**(options | extra))}

    def page_count(self) -> int:
        """Pages that can be found now; 0 before there is a store."""
        return sum(space.page_count for space in self._spaces())

    def reserved_count(self) -> int:
        """Slots that engines hold ready for what they will store."""
        return sum(space.reserved_count for space in self._spaces())

    def disk_bytes(self) -> int:
        """What the files of the store take on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.pages.rglob("*") if path.is_file())

    def wait_for_pages(self, count: int) -> None:
        """Returns when there are `count` pages. Fails if there are more, or never as many."""
        self._wait("pages", self.page_count, lambda found: found >= count)
        assert self.page_count() == count

    def contents(self) -> list[tuple[PageId, np.ndarray]]:
        """All pages with valid headers on disk and their payloads, as 32-bit floats, one row for
        each KV head. No engine is open. Fails if a page does not verify."""
        with open_store(self._config()) as opened:
            return [
                (found.page, _payloads(opened.pages, facts.geometry, found))
                for facts in opened.pages.segments()
                for found in opened.pages.scan(facts.segment)
            ]

    def wait_for_reserved(self, count_max: int) -> None:
        """Returns when no more than `count_max` slots are reserved."""
        self._wait("slots", self.reserved_count, lambda found: found <= count_max)

    def flip_bits(self, count: int = 3) -> None:
        """One bit in each of `count` payload blocks, from the middle of each segment on."""
        for path in sorted(self.pages.rglob("*")):
            if path.is_file() and path.stat().st_size >= SEGMENT_BYTES_MIN:
                content = bytearray(path.read_bytes())
                payloads = [
                    start
                    for start in range(0, len(content), 4096)
                    if any(content[start : start + 4096])
                    and not content.startswith(b"kvferry", start)
                ]
                middle = len(payloads) // 2
                for start in payloads[middle : middle + count]:
                    content[start + 100] ^= 1
                path.write_bytes(content)

    def make_ready(self, engine: EngineProcess, slot_count: int = 32) -> None:
        """Lets a fresh engine reserve slots, so that it stores all that it computes from now on:
        what a first prompt finds no slots for may be out of its window when there are some."""
        engine.generate([[1]], max_tokens=1)
        self._wait("slots", self.reserved_count, lambda found: found >= slot_count)
        engine.generate([[1]], max_tokens=1)

    @property
    def _roots(self) -> list[str]:
        return [f"posix://{root}" for root in (self.pages, *self.further)]

    def _config(self) -> Config:
        return decode({"pages": self._roots, "catalog": self.catalog_url})

    def stats(self) -> CatalogStats:
        """What the catalog says. There is one."""
        with open_store(self._config()) as opened:
            assert opened.catalog is not None
            return opened.catalog.stats()

    def _spaces(self) -> tuple[SpaceStats, ...]:
        return self.stats().spaces if self.pages.exists() else ()

    def _wait(self, what: str, look: Callable[[], int], is_enough: Callable[[int], bool]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_enough(found := look()):
            assert time.monotonic() < give_up_s, f"{found} {what} and no more"
            time.sleep(0.05)


def _payloads(pages: PageStore, geometry: PageGeometry, found: FoundPage) -> np.ndarray:
    staging = Staging(2 * geometry.page_bytes, geometry.page_bytes)
    staging.open()
    pages.register(staging.address, staging.length_bytes)
    slices = geometry.slice_count
    pages.submit_reads([Extent(found.page, geometry, found.address, 0, slices, staging.address)])
    assert [result.outcome for result in pages.wait(PATIENCE_S)] == [Outcome.OK]
    page = np.frombuffer(memory_at(staging.address, geometry.page_bytes), np.uint8)
    rows = page.reshape(slices, geometry.slice_bytes)[:, HEADER_BYTES:]
    payloads = rows[:, : geometry.payload_bytes].copy().view(np.float32)
    staging.close()
    return payloads
