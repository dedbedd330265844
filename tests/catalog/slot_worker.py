"""One of several processes that share a catalog and a folder of segments, until killed.

It stores, finds and evicts pages as an engine would. A page's content is its generation, written
where the catalog said. It prints a line when it sees what must never be: a slot that somebody else
wrote to during its lease, or a published page with other content.
"""

import contextlib
import os
import random
import sys
from pathlib import Path

from kvferry.catalog.base import LOST, Commit, Slot, Space, Verdict, Want
from kvferry.catalog.open import open_url
from kvferry.clock import SystemClock
from kvferry.errors import UnavailableError
from kvferry.layout import Address

STORE = b"s" * 16
SEGMENT_BYTES = 1 << 20
SEGMENTS_MAX = 4
CAPACITY_BYTES = SEGMENTS_MAX * SEGMENT_BYTES
LEASE_S = 1.5
GRACE_S = 1.5
SPACES = [
    Space(bytes([number]) * 32, 24, 4096, slice_count=2, chunk_tokens=16, description="")
    for number in (1, 2)
]


class Segments:
    """Files that stand for segments: 16 bytes a slot."""

    def __init__(self, folder: Path):
        self._folder = folder

    def _path(self, segment: int) -> Path:
        return self._folder / str(segment)

    def create(self, segment: int) -> None:
        self._path(segment).write_bytes(bytes(24 * 16))

    def delete(self, segment: int) -> None:
        self._path(segment).unlink(missing_ok=True)

    def write(self, slot: Slot) -> None:
        try:
            descriptor = os.open(self._path(slot.address.segment), os.O_WRONLY)
        except FileNotFoundError:
            return
        os.pwrite(descriptor, slot.generation, slot.address.slot * 16)
        os.close(descriptor)

    def read(self, address: Address) -> bytes | None:
        try:
            descriptor = os.open(self._path(address.segment), os.O_RDONLY)
        except FileNotFoundError:
            return None
        content = os.pread(descriptor, 16, address.slot * 16)
        os.close(descriptor)
        return content


class Worker:
    def __init__(self, folder: Path, url: str, seed: int):
        self._clock = SystemClock()
        self._chance = random.Random(seed)
        self._segments = Segments(folder / "segments")
        self._catalog = open_url(url, self._clock, GRACE_S)

    def run(self) -> None:
        self._catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        print("ready", flush=True)
        while True:
            space = self._chance.choice(SPACES)
            try:
                self._catalog.attach(space)
                slots = self._reserve(space)
                self._store(space, slots)
                self._find(space)
            except UnavailableError as error:
                print("unavailable", error, flush=True)
                self._reopen(error)

    def _reopen(self, error: UnavailableError) -> None:
        is_open = error.kind != LOST
        while not is_open:
            self._clock.sleep(0.01)
            with contextlib.suppress(UnavailableError):
                self._catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
                is_open = True

    def _reserve(self, space: Space) -> list[Slot]:
        self._lease_end_s = self._clock.now_s() + LEASE_S
        slots = self._catalog.reserve(space.namespace, self._chance.randint(1, 6), LEASE_S)
        if not slots:
            self._make_room(space)
        return slots

    def _make_room(self, space: Space) -> None:
        segment = self._catalog.grow(space.namespace)
        if isinstance(segment, int):
            self._segments.create(segment)
            if not self._catalog.grown(segment):
                self._segments.delete(segment)
            return
        for emptied in self._catalog.sweep([Want(space.namespace, 6)]).deletable_segments:
            self._segments.delete(emptied)
            self._catalog.shrunk(emptied)
        self._clock.sleep(0.01)

    def _store(self, space: Space, slots: list[Slot]) -> None:
        for slot in slots:
            if self._clock.now_s() < self._lease_end_s:
                self._segments.write(slot)
        self._clock.sleep(self._chance.random() * 0.005)
        for slot in slots:
            content = self._segments.read(slot.address)
            is_mine = self._clock.now_s() < self._lease_end_s
            if is_mine and content not in (None, slot.generation):
                print("two owners", slot, content.hex(), flush=True)
        given_up = [slot for slot in slots if self._chance.random() < 0.1]
        self._catalog.abort(space.namespace, given_up)
        for slot in slots:
            key = bytes([self._chance.randrange(200)]) * 32
            for first_slice in (0, 1):
                commit = Commit(key, bytes(32), 0, slot, first_slice, 1)
                (verdict,) = self._catalog.commit(space.namespace, [commit])
            if verdict is Verdict.PARTIAL:
                print("a page is missing a slice that was committed", slot, flush=True)
            self._catalog.touch(space.namespace, [key])

    def _find(self, space: Space) -> None:
        keys = [bytes([number]) * 32 for number in range(200)]
        before = self._catalog.lookup(space.namespace, keys)
        contents = [hit and self._segments.read(hit.address) for hit in before]
        after = self._catalog.lookup(space.namespace, keys)
        for first, content, second in zip(before, contents, after, strict=True):
            if first is not None and first == second and content != first.generation:
                print("a published page was overwritten", first, content, flush=True)
        found = [(key, hit.generation) for key, hit in zip(keys, after, strict=True) if hit]
        self._catalog.evict(space.namespace, self._chance.sample(found, min(3, len(found))))


if __name__ == "__main__":
    Worker(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])).run()
