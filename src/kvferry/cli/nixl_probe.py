"""Two NIXL agents in one process of its own: what is there, and whether bytes arrive.

    python -m kvferry.cli.nixl_probe

One line of JSON on standard output, `Probed`; what NIXL and UCX print goes to standard error.
"""

import ctypes
import os
from array import array

import msgspec

from kvferry._nixl import HOST, Agent
from kvferry.clock import Clock, SystemClock
from kvferry.errors import CorruptError, Error, UnavailableError
from kvferry.transfer.base import Ending, Link, PostEnded, Range, Stride
from kvferry.transfer.nixl_link import NixlLink

BACKEND = "UCX"
MEMORY = HOST.kind
PIECE_BYTES = 1 << 20
PIECE_COUNT = 64
ROUNDS = 3
READ_S = 20.0


class Probed(msgspec.Struct, frozen=True):
    """`plugins`: memory types by backend. `bytes_per_s`: of the fastest read. `problem`: what went
    wrong with the reads, empty if nothing did."""

    plugins: dict[str, list[str]]
    moved_bytes: int = 0
    bytes_per_s: float = 0.0
    problem: str = ""


class Ends:
    """A reader and a peer whose memory it reads: two links that are not open yet."""

    def __init__(self, reader: Link, peer: Link, clock: Clock):
        self._reader = reader
        self._peer = peer
        self._clock = clock
        self._target = ctypes.create_string_buffer(PIECE_BYTES * PIECE_COUNT)
        self._source = ctypes.create_string_buffer(PIECE_BYTES * PIECE_COUNT)

    def measure(self, plugins: dict[str, list[str]]) -> Probed:
        try:
            rates = self._read_all()
        except Error as error:
            return Probed(plugins, problem=error.message)
        return Probed(plugins, len(self._source), max(rates))

    def _read_all(self) -> list[float]:
        """Bytes per second of each round. Raises Error if one does not bring what was there."""
        mine, theirs = _range(self._target), _range(self._source)
        for link, memory in ((self._reader, mine), (self._peer, theirs)):
            link.open()
            link.register(memory)
        peer = self._reader.connect(self._peer.describe([theirs]))
        tables = [
            self._reader.table(
                owner, [Stride(memory.address, PIECE_BYTES, PIECE_BYTES, PIECE_COUNT)]
            )
            for owner, memory in ((None, mine), (peer, theirs))
        ]
        rates = [self._read(peer, *tables) for _ in range(ROUNDS)]
        self._reader.close(READ_S)
        self._peer.close(READ_S)
        return rates

    def _read(self, peer: str, target: int, source: int) -> float:
        """Of fresh bytes."""
        content = self._clock.random_bytes(len(self._source))
        ctypes.memmove(self._source, content, len(content))
        indices = array("i", range(PIECE_COUNT))
        started_s = self._clock.now_s()
        self._reader.post(peer, target, indices, source, indices)
        ended = self._wait(started_s + READ_S)
        duration_s = self._clock.now_s() - started_s
        if ended is None or ended.ending is not Ending.DONE:
            reason = ended.reason if ended else f"not read within {READ_S:.0f} s"
            raise UnavailableError("doctor.read", f"a read failed: {reason}")
        if self._target.raw != content:
            raise CorruptError("doctor.read", "what was read is not what was there")
        return len(content) / duration_s

    def _wait(self, give_up_s: float) -> PostEnded | None:
        while self._clock.now_s() < give_up_s:
            self._peer.poll()
            for event in self._reader.poll():
                if isinstance(event, PostEnded):
                    return event
        return None


def _range(memory: ctypes.Array) -> Range:
    return Range(ctypes.addressof(memory), len(memory))


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    clock = SystemClock()
    plugins = Agent("kvferry-doctor", ()).plugins()
    reader, peer = NixlLink(clock, (BACKEND,)), NixlLink(clock, (BACKEND,))
    replies.write(msgspec.json.encode(Ends(reader, peer, clock).measure(plugins)))
    replies.flush()


if __name__ == "__main__":
    main()
