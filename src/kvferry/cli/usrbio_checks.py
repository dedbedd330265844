"""Checks of `kvferry doctor` for pages on 3FS: each thing that USRBIO needs, and a short trial in a
folder of its own beside the store, which is gone afterwards."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli.finding import Finding, failed, passed, warning
from kvferry.cli.output import size_text
from kvferry.clock import Clock, SystemClock
from kvferry.config import Config
from kvferry.errors import ConfigError, Error
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages import hf3fs
from kvferry.pages.base import Extent, Outcome, PageId, Result
from kvferry.pages.facts import Asked
from kvferry.pages.shared_memory import SHARED_MEMORY
from kvferry.pages.usrbio import FILES_OPEN, UsrbioPages

_CHUNK_BYTES_MIN = 64 << 10
_CHUNK_BYTES_MAX = 64 << 20
_PAGE_COUNT = 16
_WAIT_S = 30.0
_GEOMETRY = PageGeometry(1, (4 << 20) - HEADER_BYTES, 16)
_NAMESPACE = bytes(32)


def check_usrbio(config: Config, root: Path) -> Iterator[Finding]:
    """In the order in which one would mend them; nothing after what stops the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        hf3fs.check_file_limits(soft, hard, FILES_OPEN)
        yield passed("open files", f"limit {soft}, hard limit {hard}")
    except ConfigError as error:
        yield failed("open files", f"limit {soft}, hard limit {hard}", error.message)
        return
    try:
        hf3fs.load_library(config.usrbio_library)
        yield passed("3FS library", config.usrbio_library or hf3fs.LIBRARY)
    except ConfigError as error:
        yield failed("3FS library", "does not load", error.message)
        return
    try:
        mount = hf3fs.find_mount(root, config.usrbio_library, FILES_OPEN)
        yield passed("3FS mount", mount.point)
    except ConfigError as error:
        yield failed("3FS mount", f"none above {root}", error.message)
        return
    yield _check_alignment(config)
    yield _check_shared_memory(config)
    yield from _try_pages(config, hf3fs.nearest_folder(root), SystemClock())


def _check_alignment(config: Config) -> Finding:
    detail = f"alignment_bytes {config.alignment_bytes}"
    if config.alignment_bytes >= _CHUNK_BYTES_MIN:
        return passed("chunks", f"{detail}: should be the chunk size of the folder")
    cure = "set alignment_bytes to the chunk size of the folder, before the store is made"
    return warning("chunks", f"{detail}: slots share chunks, writes cost more", cure)


def _check_shared_memory(config: Config) -> Finding:
    try:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        cure = f"mount the host's {SHARED_MEMORY}"
        return failed("shared memory", f"{SHARED_MEMORY}: {error.strerror}", cure)
    detail = (
        f"{size_text(free_bytes)} free, staging of each worker {size_text(config.staging_bytes)}"
    )
    if free_bytes > config.staging_bytes:
        return passed("shared memory", detail)
    cure = "give the container more (docker --shm-size), or lower staging_bytes"
    return failed("shared memory", detail, cure)


def _try_pages(config: Config, folder: Path, clock: Clock) -> Iterator[Finding]:
    probe = folder / f".kvferry-doctor-{clock.random_bytes(8).hex()}"
    asked = Asked(8 * _CHUNK_BYTES_MAX, config.alignment_bytes, 2 * _CHUNK_BYTES_MAX)
    store = UsrbioPages(probe, clock, asked, library=config.usrbio_library)
    try:
        store.open()
        yield passed("3FS daemon", f"answers user {os.geteuid()}, and has the same {SHARED_MEMORY}")
        yield from _Trial(store, clock, config.usrbio_library, probe).run()
    except Error as error:
        yield failed("3FS daemon", "does not do what is needed", error.message)
    finally:
        store.close()
        shutil.rmtree(probe, ignore_errors=True)


class _Trial:
    """Writes pages, reads and verifies them, and makes a hole of them. One thread."""

    def __init__(self, store: UsrbioPages, clock: Clock, library: str | None, folder: Path):
        self._store = store
        self._clock = clock
        self._library = library
        self._folder = folder
        self._extents: list[Extent] = []

    def run(self) -> Iterator[Finding]:
        store = self._store
        store.create_segment(1, _NAMESPACE, _GEOMETRY)
        length_bytes = _PAGE_COUNT * _GEOMETRY.page_bytes
        address, keeper = store.allocate(length_bytes)
        store.register(address, length_bytes)
        for slot in range(_PAGE_COUNT):
            page = PageId(
                _NAMESPACE, slot.to_bytes(32), bytes(32), 0, 0, self._clock.random_bytes(16)
            )
            place = address + slot * _GEOMETRY.page_bytes
            self._extents.append(Extent(page, _GEOMETRY, Address(1, slot), 0, 1, place))
            start = place - address + HEADER_BYTES
            content = self._clock.random_bytes(4096)
            keeper[start : start + 4096] = content
        yield self._timed("write", store.submit_writes)
        keeper[:length_bytes] = bytes(length_bytes)
        yield self._timed("read, verified", store.submit_reads)
        yield self._check_holes()

    def _timed(self, what: str, submit) -> Finding:
        begun_s = self._clock.now_s()
        submit(self._extents)
        results = self._results(len(self._extents))
        took_s = self._clock.now_s() - begun_s
        bad = [result for result in results if result.outcome is not Outcome.OK]
        if bad or len(results) < len(self._extents):
            reason = _reason(bad[0]) if bad else f"no answer in {_WAIT_S:.0f} s"
            cure = "look at the log of hf3fs_fuse_main and at the storage targets"
            return failed(
                what, f"{len(results) - len(bad)} of {len(self._extents)}: {reason}", cure
            )
        moved_bytes = len(self._extents) * _GEOMETRY.page_bytes
        rate = f"{moved_bytes / took_s / 1e9:.2f} GB/s" if took_s else "at once"
        return passed(what, f"{size_text(moved_bytes)} in {took_s * 1e3:.0f} ms, {rate}")

    def _check_holes(self) -> Finding:
        """A page whose chunks are gone must be absent, not zeros."""
        segment = self._folder / "segments" / f"{1:08x}.seg"
        descriptor = os.open(segment, os.O_RDWR)
        try:
            library = hf3fs.load_library(self._library)
            library.punch_hole(descriptor, 0, _CHUNK_BYTES_MAX)
        except OSError as error:
            cure = "not needed by kvferry: a sign of an old daemon"
            return warning("holes", f"punch hole: {error.strerror}", cure)
        finally:
            os.close(descriptor)
        self._store.submit_reads(self._extents[:1])
        outcomes = [result.outcome for result in self._results(1)]
        if outcomes == [Outcome.ABSENT]:
            return passed("holes", "are seen as such")
        cure = "a daemon that ignores the flag against holes: update it; pages are verified besides"
        return warning("holes", f"read as {outcomes[0].value if outcomes else 'nothing'}", cure)

    def _results(self, count: int) -> list[Result]:
        found: list[Result] = []
        until_s = self._clock.now_s() + _WAIT_S
        while len(found) < count and self._clock.now_s() < until_s:
            found += self._store.wait(0.1)
        return found


def _reason(result: Result) -> str:
    return os.strerror(result.errno) if result.errno else result.outcome.value
