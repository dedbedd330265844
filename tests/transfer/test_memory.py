"""The reference link passes the suite, and has the bad manners of remote memory."""

import pytest

from kvferry.errors import InternalError
from kvferry.testing.clock import ManualClock
from kvferry.testing.link import End, LinkSuite
from kvferry.transfer.base import Ending, Indices
from kvferry.transfer.memory import Fabric, MemoryLink, Motion


class Script:
    """Reads and letters do as told."""

    def __init__(self):
        self.motion = Motion.END
        self.may_stray = False
        self.count = 1

    def moves(self, poster, peer):
        return self.motion

    def strays(self, has_rival):
        return self.may_stray

    def letters(self, sender, receiver):
        return self.count


class TestMemoryLink(LinkSuite):
    @pytest.fixture(autouse=True)
    def fabric(self):
        self.clock = ManualClock()
        self.script = Script()
        self.fabric_between = Fabric(self.script)

    def make_link(self):
        return MemoryLink(self.fabric_between, self.clock)

    def post(self, reader, peer):
        name, mine, theirs = self.tables(reader, peer)
        indices = Indices("i", range(10))
        return reader.link.post(name, mine, indices, theirs, indices)

    def test_a_read_goes_on_while_its_poster_looks_elsewhere(self, reader, peer):
        """What was given up still lands: staging that is used again too early is overwritten."""
        self.script.motion = Motion.WAIT
        number = self.post(reader, peer)
        assert reader.link.poll() == []
        reader.buffer.view[:64] = b"#" * 64
        peer.buffer.view[:64] = b"late" * 16
        self.script.motion = Motion.COPY_ALL
        peer.link.poll()
        assert reader.piece(0) == b"late" * 16
        self.script.motion = Motion.END
        assert [event.post for event in reader.link.poll()] == [number]

    def test_a_read_takes_what_is_there_when_it_comes_by(self, reader, peer):
        """Blocks that were freed and filled again in the middle of a read: half and half."""
        self.script.motion = Motion.COPY_SOME
        peer.buffer.view[:] = b"a" * len(peer.buffer.view)
        self.post(reader, peer)
        reader.link.poll()
        peer.buffer.view[:] = b"b" * len(peer.buffer.view)
        self.script.motion = Motion.END
        (event,) = reader.link.poll()
        assert event.ending is Ending.DONE
        assert {reader.piece(index)[:1] for index in range(10)} == {b"a", b"b"}

    def test_a_write_that_was_lost_may_land_later(self, ends, reader, peer):
        """In what somebody else has by then: who trusts an ending is wrong some day."""
        self.script.motion = Motion.LOSE
        reader.buffer.view[:64] = b"late" * 16
        assert self.write(ends, [1], [0], b"done") is Ending.LOST
        peer.buffer.view[64:128] = b"#" * 64
        self.script.may_stray = True
        peer.link.poll()
        assert peer.piece(1) == b"late" * 16
        assert peer.messages == []

    def test_a_peer_is_not_forgotten_while_a_read_is_out(self, ends, reader, peer):
        self.script.motion = Motion.WAIT
        number = self.post(reader, peer)
        with pytest.raises(InternalError):
            reader.link.disconnect(peer.link.name)
        self.script.motion = Motion.LOSE
        self.until(ends, lambda: number in reader.endings)
        reader.link.disconnect(peer.link.name)

    def test_a_cut_way_is_mended_by_connecting_again(self, ends, reader, peer):
        assert self.read(ends, [1], [2]) is Ending.DONE
        self.fabric_between.cut(reader.link.name, peer.link.name)
        assert self.read(ends, [1], [2]) is Ending.LOST
        assert not reader.link.notify(peer.link.name, b"x")
        reader.link.disconnect(peer.link.name)
        assert self.read(ends, [1], [2]) is Ending.DONE

    @pytest.mark.parametrize(("count", "arrived"), [(0, 0), (2, 2), (None, 0)])
    def test_messages_are_lost_doubled_and_late(self, reader, peer, count, arrived):
        self.script.count = count
        name = reader.link.connect(peer.link.describe())
        assert reader.link.notify(name, b"x")
        assert len(peer.link.poll()) == arrived
        self.script.count = 1
        assert len(peer.link.poll()) == (count is None)

    def test_closing_with_a_read_out_says_so(self, reader, peer):
        end = End(self.make_link())
        self.script.motion = Motion.WAIT
        self.post(end, peer)
        assert not end.link.close(0.1)
