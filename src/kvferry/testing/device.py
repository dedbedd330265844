"""What every copier must do: subclass `CopierSuite` and say how to make one."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from kvferry.clock import SystemClock
from kvferry.device.base import SKIP, Copier, Done, Piece
from kvferry.layout import HEADER_BYTES, PageGeometry, Region
from kvferry.testing.staging import Buffer

BLOCK_COUNT = 9
CHUNK_BLOCKS = 3
GUARD_BYTES = 4096  # around each layer's cache, never to be written
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Nesting:
    """How one layer's cache is laid out: dimensions outermost first. `gap_bytes`: unused bytes
    after each token. Content is 16 bytes for a token, whatever the layout."""

    order: tuple[str, str, str]
    kernel_blocks: int = 1
    block_tokens: int = 4
    content_bytes: int = 16
    gap_bytes: int = 0


NESTINGS = {
    "tokens outside heads": Nesting(("block", "token", "head")),
    "heads outside tokens": Nesting(("block", "head", "token")),
    "heads outermost": Nesting(("head", "block", "token")),
    "two kernel blocks": Nesting(("block", "head", "token"), kernel_blocks=2, block_tokens=2),
    "opaque blocks": Nesting(("block", "head", "token"), block_tokens=1, content_bytes=64),
    "gaps": Nesting(("block", "token", "head"), gap_bytes=24),
}


DAMAGED = {
    "first word": (0, 0),
    "last word of the payload": (0, 2 * CHUNK_BLOCKS * 64 - 1),
    "padding": (0, 2 * CHUNK_BLOCKS * 64),
    "last byte of the last slice": (1, 4096 - 1),
}
"""Slice, and byte after its header, of pages with two layers."""


class Rig:
    """The caches of the layers of one rank, two of one nesting or one of each, and an extent for
    each of `extent_count` pages."""

    def __init__(self, nesting: Nesting | Sequence[Nesting], heads: range, extent_count: int = 4):
        nestings = [nesting] * 2 if isinstance(nesting, Nesting) else nesting
        self.heads = heads
        self.geometry = PageGeometry(len(heads), len(nestings) * CHUNK_BLOCKS * 64, 12)
        extent_bytes = len(heads) * self.geometry.slice_bytes
        self.memory = [self._memory(nesting) for nesting in nestings]
        self.regions = [
            self._region(nestings[layer], f"layer.{layer}", memory.address + GUARD_BYTES)
            for layer, memory in enumerate(self.memory)
        ]
        self.staging = Buffer(extent_count * extent_bytes)
        self.staging.view[:] = b"\xaa" * self.staging.length_bytes
        self.addresses = [self.staging.address + i * extent_bytes for i in range(extent_count)]

    def _counts(self, nesting: Nesting) -> dict[str, int]:
        blocks = BLOCK_COUNT * nesting.kernel_blocks
        return {"block": blocks, "head": len(self.heads), "token": nesting.block_tokens}

    def _memory(self, nesting: Nesting) -> Buffer:
        token_bytes = nesting.content_bytes + nesting.gap_bytes
        blocks, heads, tokens = self._counts(nesting).values()
        return Buffer(blocks * heads * tokens * token_bytes + 2 * GUARD_BYTES)

    def _region(self, nesting: Nesting, layer: str, address: int) -> Region:
        strides, stride_bytes = {}, nesting.content_bytes + nesting.gap_bytes
        for name in reversed(nesting.order):
            strides[name] = stride_bytes
            stride_bytes *= self._counts(nesting)[name]
        return Region(
            layer,
            address,
            BLOCK_COUNT,
            nesting.kernel_blocks,
            len(self.heads),
            nesting.block_tokens,
            nesting.content_bytes,
            strides["block"],
            strides["head"],
            strides["token"],
        )

    def write_blocks(self, blocks: Sequence[int], names: Sequence[str]) -> None:
        """Fills blocks with the content of these names."""
        for block, name in zip(blocks, names, strict=True):
            self._move(block, lambda layer, head, name=name: content(name, layer, head))

    def read_block(self, block: int) -> list[bytes]:
        """Content of a block: by head, then by layer."""
        return [
            b"".join(bytes(part) for part in self._parts(layer, head, block))
            for head in range(len(self.heads))
            for layer in range(len(self.regions))
        ]

    def _move(self, block: int, source) -> None:
        for layer in range(len(self.regions)):
            for head in range(len(self.heads)):
                rest = source(layer, self.heads[head])
                for part in self._parts(layer, head, block):
                    part[:] = rest[: len(part)]
                    rest = rest[len(part) :]

    def _parts(self, layer: int, head: int, block: int) -> list[memoryview]:
        region, view = self.regions[layer], self.memory[layer].view[GUARD_BYTES:]
        first = block * region.kernel_blocks
        return [
            view[start : start + region.content_bytes]
            for kernel_block in range(first, first + region.kernel_blocks)
            for token in range(region.block_tokens)
            for start in [
                kernel_block * region.block_stride_bytes
                + head * region.head_stride_bytes
                + token * region.token_stride_bytes
            ]
        ]

    def write_extent(self, index: int, names: Sequence[str]) -> None:
        """Fills the payloads of an extent, as another rank's gather would have."""
        for head, start in self._payload_starts(index):
            payload = self.payload(names, head)
            self.staging.view[start : start + len(payload)] = payload

    def payload(self, names: Sequence[str], head: int) -> bytes:
        """The canonical payload of one head of a chunk: by layer, then by block."""
        layers = range(len(self.regions))
        return b"".join(content(name, layer, head) for layer in layers for name in names)

    def payloads(self, index: int) -> list[bytes]:
        """The payloads of an extent, with their padding."""
        length_bytes = self.geometry.padded_payload_bytes
        starts = [start for _, start in self._payload_starts(index)]
        return [bytes(self.staging.view[start : start + length_bytes]) for start in starts]

    def padded_payloads(self, names: Sequence[str]) -> list[bytes]:
        """What `payloads` should be after a gather of blocks with these names."""
        length_bytes = self.geometry.padded_payload_bytes
        return [self.payload(names, head).ljust(length_bytes, b"\0") for head in self.heads]

    def damage(self, index: int, slice_index: int, offset_bytes: int) -> None:
        """Flips a bit after the header of a slice of an extent."""
        _, start = self._payload_starts(index)[slice_index]
        self.staging.view[start + offset_bytes] ^= 1

    def are_guards_intact(self) -> bool:
        guards = (m.view[start:][:GUARD_BYTES] for m in self.memory for start in (0, -GUARD_BYTES))
        return all(bytes(guard) == bytes(GUARD_BYTES) for guard in guards)

    def headers(self, index: int) -> set[bytes]:
        starts = [start - HEADER_BYTES for _, start in self._payload_starts(index)]
        return {bytes(self.staging.view[start : start + HEADER_BYTES]) for start in starts}

    def _payload_starts(self, index: int) -> list[tuple[int, int]]:
        first = self.addresses[index] - self.staging.address + HEADER_BYTES
        return [(head, first + i * self.geometry.slice_bytes) for i, head in enumerate(self.heads)]


def content(name: str, layer: int, head: int) -> bytes:
    """64 bytes of one block, layer and head."""
    return hashlib.blake2b(f"{name} {layer} {head}".encode(), digest_size=64).digest()


class OpenCopiers:
    """What the suites share. A subclass of one overrides `make`, and `engine_does` where the
    engine's thread goes on before the device has done what it was given."""

    def make(self, rig: Rig) -> Copier:
        """A copier over the rig's regions, not open."""
        raise NotImplementedError

    def engine_does(self, work: Callable[[], None]) -> None:
        """The engine's thread gives work to the device: it is done after what it gave before."""
        work()

    @pytest.fixture
    def closing(self):
        """Closes what a test has opened."""
        opened: list[Copier] = []
        yield opened
        for copier in opened:
            copier.close()

    @pytest.fixture
    def copier_of(self, closing):
        def open_copier(rig: Rig) -> Copier:
            copier = self.make(rig)
            copier.open()
            closing.append(copier)
            return copier

        return open_copier


class CopierSuite(OpenCopiers):
    """Conformance of a `Copier`, whether it proves pages or not."""

    @pytest.mark.parametrize("name", NESTINGS)
    def test_a_gather_is_in_canonical_order(self, copier_of, name):
        rig = Rig(NESTINGS[name], range(2))
        copier = copier_of(rig)
        rig.write_blocks([7, 2, 5], ["a", "b", "c"])
        complete(copier, [copier.submit_gather([Piece((7, 2, 5), rig.addresses[1])])])
        assert rig.payloads(1) == rig.padded_payloads(["a", "b", "c"])

    @pytest.mark.parametrize("name", NESTINGS)
    def test_a_scatter_puts_every_byte_where_a_gather_took_it(self, copier_of, name):
        rig = Rig(NESTINGS[name], range(2))
        copier = copier_of(rig)
        rig.write_blocks(range(BLOCK_COUNT), ["old"] * BLOCK_COUNT)
        rig.write_extent(0, ["a", "b", "c"])
        complete(copier, [copier.submit_scatter([Piece((3, 8, 1), rig.addresses[0])])])
        written = Rig(NESTINGS[name], range(2))
        written.write_blocks(range(BLOCK_COUNT), ["old", "c", "old", "a", *["old"] * 4, "b"])
        assert [bytes(m.view) for m in rig.memory] == [bytes(m.view) for m in written.memory]

    def test_layers_may_differ_in_layout(self, copier_of):
        rig = Rig(list(NESTINGS.values()), range(2))
        copier = copier_of(rig)
        rig.write_blocks([7, 2, 5], ["a", "b", "c"])
        complete(copier, [copier.submit_gather([Piece((7, 2, 5), rig.addresses[1])])])
        assert rig.payloads(1) == rig.padded_payloads(["a", "b", "c"])
        rig.write_extent(2, ["d", "e", "f"])
        complete(copier, [copier.submit_scatter([Piece((5, 7, 0), rig.addresses[2])])])
        for block, name in zip((5, 7, 0, 2), "defb", strict=True):
            assert rig.read_block(block) == _expected(rig, name)
        assert rig.are_guards_intact()

    def test_a_skipped_block_is_left_alone(self, copier_of):
        rig = Rig(NESTINGS["heads outside tokens"], range(2))
        copier = copier_of(rig)
        rig.write_blocks([0, 4], ["mine", "old"])
        rig.write_extent(0, ["a", "b", "c"])
        complete(copier, [copier.submit_scatter([Piece((SKIP, 4, SKIP), rig.addresses[0])])])
        assert rig.read_block(0) == _expected(rig, "mine")
        assert rig.read_block(4) == _expected(rig, "b")
        assert rig.are_guards_intact()

    def test_no_staging_is_touched_but_that_of_the_pieces(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(2))
        copier = copier_of(rig)
        copies = [Piece((1, 2, 3), rig.addresses[i]) for i in (0, 1, 3)]
        complete(copier, [copier.submit_gather(copies)])
        before = bytes(rig.staging.view)
        complete(copier, [copier.submit_scatter(copies)])
        assert bytes(rig.staging.view) == before
        assert rig.headers(2) == {b"\xaa" * HEADER_BYTES}
        assert set(b"".join(rig.payloads(2))) == {0xAA}

    @pytest.mark.parametrize("source", NESTINGS)
    @pytest.mark.parametrize("target", NESTINGS)
    def test_layouts_and_degrees_read_one_another(self, copier_of, source, target):
        """What two ranks with a head each have gathered, one rank with both heads loads."""
        loading = Rig(NESTINGS[target], range(2))
        for head in range(2):
            storing = Rig(NESTINGS[source], range(head, head + 1))
            storing.write_blocks([6, 1, 4], ["a", "b", "c"])
            copier = copier_of(storing)
            complete(copier, [copier.submit_gather([Piece((6, 1, 4), storing.addresses[0])])])
            start = loading.addresses[0] - loading.staging.address
            start += head * loading.geometry.slice_bytes
            page = storing.staging.view[: storing.geometry.slice_bytes]
            loading.staging.view[start : start + len(page)] = page
        copier = copier_of(loading)
        complete(copier, [copier.submit_scatter([Piece((5, 6, 7), loading.addresses[0])])])
        for block, name in zip((5, 6, 7), "abc", strict=True):
            assert loading.read_block(block) == _expected(loading, name)

    def test_each_job_is_returned_once_also_after_a_fence(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1), extent_count=8)
        copier = copier_of(rig)
        jobs = [copier.submit_gather([Piece((1, 2, 3), address)]) for address in rig.addresses]
        assert len(set(jobs)) == 8
        assert copier.finish(jobs[3:5], TIMEOUT_S)
        assert copier.finish(jobs, TIMEOUT_S)
        assert sorted(done.job for done in complete(copier, jobs)) == jobs
        assert copier.poll() == []

    def test_a_job_that_poll_returned_is_done(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1))
        copier = copier_of(rig)
        job = copier.submit_gather([Piece((1, 2, 3), rig.addresses[0])])
        complete(copier, [job])
        assert copier.finish([job], 0.0)

    def test_a_fence_means_that_the_blocks_have_been_read(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1), extent_count=8)
        copier = copier_of(rig)
        rig.write_blocks(range(BLOCK_COUNT), ["old"] * BLOCK_COUNT)
        jobs = [copier.submit_gather([Piece((1, 2, 3), address)]) for address in rig.addresses]
        assert copier.finish(jobs, TIMEOUT_S)
        self.engine_does(lambda: rig.write_blocks(range(BLOCK_COUNT), ["new"] * BLOCK_COUNT))
        complete(copier, jobs)
        assert all(rig.payloads(i) == rig.padded_payloads(["old"] * 3) for i in range(8))

    def test_a_gather_reads_what_the_engine_has_computed(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1))
        copier = copier_of(rig)
        self.engine_does(lambda: rig.write_blocks([1, 2, 3], ["a", "b", "c"]))
        copier.order_gathers()
        complete(copier, [copier.submit_gather([Piece((1, 2, 3), rig.addresses[0])])])
        assert rig.payloads(0) == rig.padded_payloads(["a", "b", "c"])

    def test_a_scatter_waits_until_the_engine_is_done_with_its_blocks(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1))
        copier = copier_of(rig)
        rig.write_extent(0, ["a", "b", "c"])
        self.engine_does(lambda: rig.write_blocks([1, 2, 3], ["old"] * 3))
        copier.order_scatters()
        complete(copier, [copier.submit_scatter([Piece((1, 2, 3), rig.addresses[0])])])
        for block, name in zip((1, 2, 3), "abc", strict=True):
            assert rig.read_block(block) == _expected(rig, name)

    def test_many_pieces_are_one_job(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(2), extent_count=8)
        copier = copier_of(rig)
        rig.write_blocks([1, 2, 3, 4], ["a", "b", "c", "d"])
        blocks = [(1 + i % 4, 1 + (i + 1) % 4, 1 + (i + 2) % 4) for i in range(8)]
        order = (4, 5, 7, 0, 1, 6, 2)
        pieces = [Piece(blocks[i], rig.addresses[i]) for i in order]
        complete(copier, [copier.submit_gather(pieces)])
        for i in order:
            names = ["abcd"[block - 1] for block in blocks[i]]
            assert rig.payloads(i) == rig.padded_payloads(names)
        assert set(b"".join(rig.payloads(3))) == {0xAA}

    def test_pieces_of_one_job_may_have_fewer_blocks(self, copier_of):
        rig = Rig(NESTINGS["tokens outside heads"], range(2))
        copier = copier_of(rig)
        rig.write_blocks([1, 2, 3], ["a", "b", "c"])
        pieces = [Piece((1, 2), rig.addresses[2]), Piece((3, 2, 1), rig.addresses[0])]
        complete(copier, [copier.submit_gather(pieces)])
        assert rig.payloads(0) == rig.padded_payloads(["c", "b", "a"])
        assert rig.payloads(2) == rig.padded_payloads(["a", "b"])

    def test_close_finishes_what_was_submitted(self):
        rig = Rig(NESTINGS["opaque blocks"], range(1))
        copier = self.make(rig)
        copier.open()
        rig.write_blocks([1, 2, 3], ["a", "b", "c"])
        copier.submit_gather([Piece((1, 2, 3), rig.addresses[0])])
        copier.close()
        copier.close()
        assert rig.payloads(0) == rig.padded_payloads(["a", "b", "c"])

    def test_a_gather_needs_all_of_its_blocks(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1))
        with pytest.raises(ValueError):
            copier_of(rig).submit_gather([Piece((1, SKIP, 3), rig.addresses[0])])

    def test_more_blocks_than_a_slice_holds_are_refused(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(1))
        copier = copier_of(rig)
        many = Piece((1,) * 40, rig.addresses[0])
        for submit in (copier.submit_gather, copier.submit_scatter):
            with pytest.raises(ValueError):
                submit([many])

    def test_checksums_that_it_cannot_verify_are_refused(self, copier_of):
        """Bytes that nobody has verified would be another prompt's KV."""
        rig = Rig(NESTINGS["opaque blocks"], range(2))
        copier = copier_of(rig)
        with pytest.raises(ValueError):
            copier.submit_scatter([Piece((1, 2, 3), rig.addresses[0], (0,))])
        if not copier.proves_pages:
            with pytest.raises(ValueError):
                copier.submit_scatter([Piece((1, 2, 3), rig.addresses[0], (0, 0))])


class ProofSuite(OpenCopiers):
    """What a `Copier` that proves pages does as well. `digest`, a static method: the checksum that
    it computes."""

    digest: Callable[[bytes], int]

    def checksums(self, rig: Rig, index: int) -> tuple[int, ...]:
        """What the slices of an extent should have as they are now."""
        return tuple(map(self.digest, rig.payloads(index)))

    def test_a_gather_gives_the_checksums_of_its_slices(self, copier_of):
        rig = Rig(NESTINGS["opaque blocks"], range(2))
        copier = copier_of(rig)
        rig.write_blocks([1, 2, 3], ["a", "b", "c"])
        blocks = {3: (2, 1), 0: (3, 1, 2), 2: (1, 2, 3)}
        pieces = [Piece(blocks, rig.addresses[index]) for index, blocks in blocks.items()]
        (done,) = complete(copier, [copier.submit_gather(pieces)])
        assert done.checksums == tuple(self.checksums(rig, index) for index in blocks)

    @pytest.mark.parametrize("place", DAMAGED)
    def test_nothing_of_a_damaged_piece_is_scattered(self, copier_of, place):
        rig = Rig(NESTINGS["opaque blocks"], range(2))
        copier = copier_of(rig)
        rig.write_blocks(range(BLOCK_COUNT), ["old"] * BLOCK_COUNT)
        blocks = {2: (6, 7, 8), 1: (3, 4, 5), 0: (0, 1, 2)}
        for index in blocks:
            rig.write_extent(index, ["a", "b", "c"])
        pieces = [Piece(blocks[i], rig.addresses[i], self.checksums(rig, i)) for i in blocks]
        rig.damage(1, *DAMAGED[place])
        (done,) = complete(copier, [copier.submit_scatter(pieces)])
        assert done.failed == (1,)
        for index, names in ((2, "abc"), (1, ["old"] * 3), (0, "abc")):
            for block, name in zip(blocks[index], names, strict=True):
                assert rig.read_block(block) == _expected(rig, name)

    def test_blocks_that_are_skipped_are_verified(self, copier_of):
        rig = Rig(NESTINGS["heads outside tokens"], range(2))
        copier = copier_of(rig)
        rig.write_blocks([3, 4, 5], ["old"] * 3)
        rig.write_extent(0, ["a", "b", "c"])
        rig.write_extent(1, ["a", "b", "c"])
        pieces = [
            Piece((SKIP, 3, 4), rig.addresses[0], self.checksums(rig, 0)),
            Piece((SKIP, SKIP, 5), rig.addresses[1], self.checksums(rig, 1)),
        ]
        rig.damage(1, 0, 0)
        (done,) = complete(copier, [copier.submit_scatter(pieces)])
        assert done.failed == (1,)
        for block, name in zip((3, 4, 5), ("b", "c", "old"), strict=True):
            assert rig.read_block(block) == _expected(rig, name)

    def test_pieces_of_one_job_are_proven_each_by_itself(self, copier_of):
        """Also where some have been verified already, and some have fewer blocks."""
        rig = Rig(NESTINGS["opaque blocks"], range(2))
        copier = copier_of(rig)
        rig.write_blocks([1, 2, 3, 4, 5, 6], ["old"] * 6)
        for index in range(4):
            rig.write_extent(index, ["a", "b", "c"])
        good, bad = self.checksums(rig, 0), self.checksums(rig, 0)[::-1]
        pieces = [
            Piece((1,), rig.addresses[3], bad),
            Piece((2,), rig.addresses[2], good),
            Piece((3, 4), rig.addresses[1]),
            Piece((5, 6), rig.addresses[0], bad),
        ]
        (done,) = complete(copier, [copier.submit_scatter(pieces)])
        assert sorted(done.failed) == [0, 3]
        names = ("old", "a", "a", "b", "old", "old")
        for block, name in zip(range(1, 7), names, strict=True):
            assert rig.read_block(block)[0] == content(name, 0, 0)


def complete(copier: Copier, jobs: Iterable[int]) -> list[Done]:
    """Polls until these jobs are done; all that was returned."""
    clock, waiting, returned = SystemClock(), set(jobs), []
    give_up_s = clock.now_s() + TIMEOUT_S
    while waiting:
        returned += copier.poll()
        waiting.difference_update(done.job for done in returned)
        assert not waiting or clock.now_s() < give_up_s, f"jobs that never end: {waiting}"
    return returned


def _expected(rig: Rig, name: str) -> list[bytes]:
    """A block of this name, as `Rig.read_block` gives it."""
    return [content(name, layer, head) for head in rig.heads for layer in range(len(rig.regions))]
