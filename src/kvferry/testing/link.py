"""What every link must do: subclass `LinkSuite` and give it `make_link`.

Nothing here measures time: a test waits until what must happen has happened, and fails after many
rounds without it.
"""

from collections.abc import Callable, Iterator

import pytest

from kvferry.clock import SystemClock
from kvferry.errors import ClosedError, IncompatibleError, UnavailableError
from kvferry.testing.clock import Chance
from kvferry.testing.staging import Buffer
from kvferry.transfer.base import Ending, Event, Indices, Link, Message, PostEnded, Range, Stride

ROUNDS = 20_000
MEMORY_BYTES = 1 << 20
PIECE_BYTES = 64


class End:
    """A link with memory of its own, and all that has happened to it."""

    def __init__(self, link: Link):
        self.link = link
        self.buffer, self.private = Buffer(MEMORY_BYTES), Buffer(65536)
        self.events: list[Event] = []
        link.open()
        link.register(self.memory)
        link.register(Range(self.private.address, self.private.length_bytes))

    @property
    def memory(self) -> Range:
        return Range(self.buffer.address, self.buffer.length_bytes)

    @property
    def messages(self) -> list[Message]:
        return [event for event in self.events if isinstance(event, Message)]

    @property
    def endings(self) -> dict[int, Ending]:
        return {e.post: e.ending for e in self.events if isinstance(e, PostEnded)}

    def stride(self, piece_bytes: int = PIECE_BYTES, first: int = 0) -> Stride:
        """All of the memory from piece `first` on, in pieces."""
        count = MEMORY_BYTES // piece_bytes - first
        return Stride(self.buffer.address + first * piece_bytes, piece_bytes, piece_bytes, count)

    def piece(self, index: int) -> bytes:
        return bytes(self.buffer.view[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])


class LinkSuite:
    """See the module. `reader` reads from `peer`, who never asked for it."""

    make_link: Callable[[], Link]

    @pytest.fixture
    def ends(self) -> Iterator[list[End]]:
        ends = [End(self.make_link()), End(self.make_link())]
        ends[1].buffer.view[:] = Chance(1).randbytes(MEMORY_BYTES)
        yield ends
        for end in ends:
            assert end.link.close(5.0)

    @pytest.fixture
    def reader(self, ends) -> End:
        return ends[0]

    @pytest.fixture
    def peer(self, ends) -> End:
        return ends[1]

    def until(self, ends: list[End], holds: Callable[[], bool]) -> None:
        for _ in range(ROUNDS):
            for end in ends:
                end.events += end.link.poll()
            if holds():
                return
            SystemClock().sleep(0.0005)
        raise AssertionError(f"it did not happen; events: {[end.events[-5:] for end in ends]}")

    def tables(self, reader: End, peer: End) -> tuple[str, int, int]:
        name = reader.link.connect(peer.link.describe([peer.memory]))
        return (
            name,
            reader.link.table(None, [reader.stride()]),
            reader.link.table(name, [peer.stride()]),
        )

    def write(self, ends: list[End], targets: list[int], sources: list[int], notice=b"") -> Ending:
        """As `read`, the other way."""
        reader, peer = ends
        name, mine, theirs = self.tables(reader, peer)
        number = reader.link.post(
            name, theirs, Indices("i", targets), mine, Indices("i", sources), notice
        )
        self.until(ends, lambda: number in reader.endings)
        return reader.endings[number]

    def read(self, ends: list[End], targets: list[int], sources: list[int]) -> Ending:
        reader, peer = ends
        name, mine, theirs = self.tables(reader, peer)
        number = reader.link.post(name, mine, Indices("i", targets), theirs, Indices("i", sources))
        self.until(ends, lambda: number in reader.endings)
        return reader.endings[number]

    def test_a_read_brings_the_pieces_that_it_names(self, ends, reader, peer):
        targets, sources = [5, 6, 7, 100, 3, 40], [9, 10, 11, 2, 1, 4000]
        assert self.read(ends, targets, sources) is Ending.DONE
        for target, source in zip(targets, sources, strict=True):
            assert reader.piece(target) == peer.piece(source)
        untouched = set(range(200)) - set(targets)
        assert all(reader.piece(index) == bytes(PIECE_BYTES) for index in untouched)

    def test_thousands_of_pieces_in_any_order(self, ends, reader, peer):
        chance = Chance(2)
        targets, sources = (chance.sample(range(MEMORY_BYTES // PIECE_BYTES), 4000) for _ in "ab")
        assert self.read(ends, targets, sources) is Ending.DONE
        assert all(
            reader.piece(target) == peer.piece(source)
            for target, source in zip(targets, sources, strict=True)
        )

    def test_indices_count_over_all_strides_of_a_table(self, ends, reader, peer):
        """Tables have a stride for each layer: an index of the second must not meet the first."""
        name, mine, _ = self.tables(reader, peer)
        start = peer.buffer.address
        theirs = reader.link.table(
            name,
            [Stride(start, PIECE_BYTES, 256, 10), Stride(start + 8192, PIECE_BYTES, 512, 10)],
        )
        indices = Indices("i", [0, 1, 2]), Indices("i", [3, 10, 12])
        number = reader.link.post(name, mine, indices[0], theirs, indices[1])
        self.until(ends, lambda: number in reader.endings)
        places = [3 * 256, 8192, 8192 + 2 * 512]
        expected = [peer.piece(place // PIECE_BYTES) for place in places]
        assert [reader.piece(index) for index in range(3)] == expected

    def test_each_of_many_reads_ends_once(self, ends, reader, peer):
        name, mine, theirs = self.tables(reader, peer)
        numbers = [
            reader.link.post(name, mine, Indices("i", [i]), theirs, Indices("i", [i + 1]))
            for i in range(50)
        ]
        assert len(set(numbers)) == 50
        self.until(ends, lambda: reader.endings.keys() >= set(numbers))
        for _ in range(20):
            reader.events += reader.link.poll()
        assert len([e for e in reader.events if isinstance(e, PostEnded)]) == 50

    @pytest.mark.parametrize(
        ("targets", "sources"), [([], []), ([1, 2], [1]), ([1], [1 << 20]), ([-1], [1])]
    )
    def test_a_read_that_names_nonsense_is_refused(self, ends, targets, sources):
        assert self.read(ends, targets, sources) is Ending.REFUSED

    def test_a_read_from_nobody_is_refused(self, ends, reader, peer):
        name, mine, theirs = self.tables(reader, peer)
        reader.link.disconnect(name)
        one = Indices("i", [1])
        number = reader.link.post(name, mine, one, theirs, one)
        self.until(ends, lambda: number in reader.endings)
        assert reader.endings[number] is Ending.REFUSED

    def test_a_write_brings_the_pieces_that_it_names(self, ends, reader, peer):
        reader.buffer.view[:] = Chance(3).randbytes(MEMORY_BYTES)
        before = bytes(peer.buffer.view[: 200 * PIECE_BYTES])
        targets, sources = [5, 6, 7, 100, 3, 40], [9, 10, 11, 2, 1, 4000]
        assert self.write(ends, targets, sources, b"they are there") is Ending.DONE
        self.until(ends, lambda: bool(peer.messages))
        for target, source in zip(targets, sources, strict=True):
            assert peer.piece(target) == reader.piece(source)
        for index in set(range(200)) - set(targets):
            assert peer.piece(index) == before[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]

    def test_a_notice_comes_after_all_bytes_of_its_write(self, ends, reader, peer):
        """Whoever hears it looks at them at once."""
        size_bytes = MEMORY_BYTES // 2
        name = reader.link.connect(peer.link.describe([peer.memory]))
        mine = reader.link.table(None, [reader.stride(size_bytes)])
        theirs = reader.link.table(name, [peer.stride(size_bytes)])
        for number in range(20):
            reader.buffer.view[:] = bytes([number]) * MEMORY_BYTES
            post = reader.link.post(
                name, theirs, Indices("i", [1]), mine, Indices("i", [0]), bytes([number]) * 300
            )
            self.until(ends, lambda n=number: len(peer.messages) == n + 1)
            assert peer.messages[-1].content == bytes([number]) * 300
            assert peer.messages[-1].sender == reader.link.name
            assert bytes(peer.buffer.view[size_bytes:]) == bytes([number]) * size_bytes
            self.until(ends, lambda p=post: p in reader.endings)
            assert reader.endings[post] is Ending.DONE

    @pytest.mark.parametrize(
        ("targets", "sources"), [([], []), ([1, 2], [1]), ([1], [1 << 20]), ([-1], [1])]
    )
    def test_a_write_that_names_nonsense_is_refused(self, ends, targets, sources):
        assert self.write(ends, targets, sources) is Ending.REFUSED

    @pytest.mark.parametrize("is_own", [True, False])
    def test_between_two_tables_of_one_side_nothing_moves(self, ends, reader, peer, is_own):
        name, mine, theirs = self.tables(reader, peer)
        table, one = mine if is_own else theirs, Indices("i", [1])
        number = reader.link.post(name, table, one, table, Indices("i", [2]))
        self.until(ends, lambda: number in reader.endings)
        assert reader.endings[number] is Ending.REFUSED

    def test_only_what_was_described_can_be_read(self, reader, peer):
        """Whoever reaches more than what was offered reads other users' text."""
        name = reader.link.connect(peer.link.describe([peer.memory]))
        reader.link.table(name, [Stride(peer.memory.address, PIECE_BYTES, PIECE_BYTES, 10)])
        with pytest.raises(IncompatibleError):
            reader.link.table(name, [Stride(peer.private.address, PIECE_BYTES, PIECE_BYTES, 10)])
        with pytest.raises(IncompatibleError):
            reader.link.table(name, [Stride(peer.memory.end - 64, 65536 * 4, 65536 * 4, 1)])

    def test_only_registered_memory_can_be_a_target(self, reader):
        foreign = Buffer(4096)
        with pytest.raises(IncompatibleError):
            reader.link.table(None, [Stride(foreign.address, 64, 64, 10)])

    def test_a_description_without_ranges_opens_nothing(self, reader, peer):
        name = reader.link.connect(peer.link.describe())
        with pytest.raises(IncompatibleError):
            reader.link.table(name, [peer.stride()])

    def test_a_table_of_a_stranger_is_unavailable(self, reader):
        with pytest.raises(UnavailableError):
            reader.link.table("nobody", [reader.stride()])

    @pytest.mark.parametrize("junk", [b"", b"x", b"\x00" * 100, b"\xff" * 3000])
    def test_junk_is_no_description(self, reader, junk):
        with pytest.raises(IncompatibleError):
            reader.link.connect(junk)

    def test_connecting_twice_is_the_same_peer(self, reader, peer):
        description = peer.link.describe([peer.memory])
        name = reader.link.connect(description)
        assert reader.link.connect(description) == name == peer.link.name

    def test_a_message_arrives_with_its_sender(self, ends, reader, peer):
        name = reader.link.connect(peer.link.describe())
        contents = [b"x", bytes(range(256)), b"y" * 100_000]
        assert all(reader.link.notify(name, content) for content in contents)
        self.until(ends, lambda: len(peer.messages) == 3)
        assert sorted(m.content for m in peer.messages) == sorted(contents)
        assert {m.sender for m in peer.messages} == {reader.link.name}

    def test_a_message_to_nobody_is_not_sent(self, reader):
        assert not reader.link.notify("nobody", b"x")

    def test_an_answer_goes_back(self, ends, reader, peer):
        """The receiver learns of the sender by what it says, as leases are acknowledged."""
        name = reader.link.connect(peer.link.describe())
        reader.link.notify(name, reader.link.describe())
        self.until(ends, lambda: bool(peer.messages))
        back = peer.link.connect(peer.messages[0].content)
        assert peer.link.notify(back, b"welcome")
        self.until(ends, lambda: bool(reader.messages))
        assert reader.messages[0].content == b"welcome"

    def test_a_peer_that_is_gone_costs_the_read_and_no_more(self, ends, reader, peer):
        name, mine, theirs = self.tables(reader, peer)
        one = Indices("i", [1])
        first = reader.link.post(name, mine, one, theirs, one)
        self.until(ends, lambda: first in reader.endings)
        peer.link.close(5.0)
        for _ in range(200):  # a transport hears of it when it is driven
            reader.events += reader.link.poll()
            SystemClock().sleep(0.0005)
        number = reader.link.post(name, mine, one, theirs, one)
        self.until([reader], lambda: number in reader.endings)
        assert reader.endings[number] is not Ending.DONE
        reader.link.disconnect(name)
        other = End(self.make_link())
        other.buffer.view[:64] = b"o" * 64
        name, mine, theirs = self.tables(reader, other)
        number = reader.link.post(name, mine, one, theirs, Indices("i", [0]))
        self.until([reader, other], lambda: number in reader.endings)
        assert (reader.endings[number], reader.piece(1)) == (Ending.DONE, b"o" * 64)
        assert other.link.close(5.0)

    def test_a_peer_can_be_forgotten_and_met_again(self, ends, reader, peer):
        """The only way back after the connection broke: it must work with what is at hand."""
        for _ in range(3):
            assert self.read(ends, [1], [2]) is Ending.DONE
            reader.link.disconnect(peer.link.name)
            reader.link.disconnect(peer.link.name)

    def test_a_name_is_never_used_again(self, reader):
        other = End(self.make_link())
        assert other.link.name != reader.link.name
        first = other.link.name
        other.link.close(1.0)
        other.link.open()
        assert other.link.name not in (first, reader.link.name)
        assert other.link.close(1.0)

    def test_after_close_nothing_is_done(self, reader, peer):
        other = End(self.make_link())
        other.link.close(1.0)
        other.link.close(1.0)
        for call in (other.link.poll, other.link.describe):
            with pytest.raises(ClosedError):
                call()
