"""The readable link: ends in one process, over memory that the fabric copies piece by piece.

It has the manners of remote memory: a read takes what is there when it gets to a piece, asks
nobody, goes on while its poster looks elsewhere (any end's `poll` moves all reads), and ends when
the schedule says so. `Prompt` does everything at once; tests pass schedules of their own.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Protocol

import msgspec

from kvferry.clock import Clock
from kvferry.errors import ClosedError, IncompatibleError, InternalError, UnavailableError
from kvferry.transfer.base import (
    MESSAGE_BYTES_MAX,
    Ending,
    Event,
    Indices,
    Message,
    Range,
    ReadEnded,
    Stride,
)


class Motion(Enum):
    """What a read does next."""

    WAIT = "wait"
    COPY_SOME = "copy_some"  # half of what is left, at least one piece
    COPY_ALL = "copy_all"  # but it does not say so yet
    END = "end"
    LOSE = "lose"


class Schedule(Protocol):
    """Asked whenever something could happen."""

    def read(self, reader: str, peer: str) -> Motion: ...

    def letters(self, sender: str, receiver: str) -> int | None:
        """How often a message arrives now; 0: it is lost; None: it waits."""


class Prompt:
    """Everything at once, nothing lost."""

    def read(self, reader: str, peer: str) -> Motion:
        return Motion.END

    def letters(self, sender: str, receiver: str) -> int | None:
        return 1


class _Description(msgspec.Struct, frozen=True, array_like=True):
    name: str
    readable: tuple[Range, ...]


@dataclass(slots=True)
class _Read:
    number: int
    peer: str
    moves: list[tuple[int, int, int]]  # target, source, bytes: those that are left
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class _Table:
    peer: str | None
    strides: tuple[Stride, ...]

    def pieces(self, indices: Indices) -> list[tuple[int, int]]:
        """Address and bytes of each; IndexError if there is none."""
        ends = list(accumulate(stride.count for stride in self.strides))
        found = []
        for index in indices:
            number = bisect_right(ends, index)
            if index < 0 or number == len(ends):
                raise IndexError
            stride = self.strides[number]
            place = index - (ends[number] - stride.count)
            found.append((stride.address + place * stride.stride_bytes, stride.piece_bytes))
        return found


class Fabric:
    """What connects the ends of one process. One thread."""

    def __init__(self, schedule: Schedule | None = None):
        self._schedule = schedule or Prompt()
        self._ends: dict[str, MemoryLink] = {}
        self._letters: list[tuple[str, str, bytes]] = []
        self._cuts: set[frozenset[str]] = set()

    def join(self, end: "MemoryLink") -> None:
        self._ends[end.name] = end

    def leave(self, end: "MemoryLink") -> None:
        self._ends.pop(end.name, None)

    def is_alive(self, name: str) -> bool:
        return name in self._ends

    def cut(self, one: str, other: str) -> None:
        """The way between two ends breaks, both live on. It is mended by a new `connect`."""
        self._cuts.add(frozenset((one, other)))

    def mend(self, one: str, other: str) -> None:
        self._cuts.discard(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cuts

    def send(self, sender: str, receiver: str, content: bytes) -> None:
        self._letters.append((sender, receiver, content))

    def step(self) -> None:
        """Whatever is due happens."""
        letters, self._letters = self._letters, []
        for sender, receiver, content in letters:
            count = self._schedule.letters(sender, receiver)
            if count is None:
                self._letters.append((sender, receiver, content))
            elif receiver in self._ends:
                self._ends[receiver].arrived += [Message(sender, content)] * count
        for end in list(self._ends.values()):
            for read in list(end.reads.values()):
                self._move(end, read)

    def _move(self, end: "MemoryLink", read: _Read) -> None:
        if read.refusal:
            end.end(read, Ending.REFUSED, read.refusal)
            return
        if not self.is_alive(read.peer) or self.is_cut(end.name, read.peer):
            end.end(read, Ending.LOST, "the peer is gone")
            return
        motion = self._schedule.read(end.name, read.peer)
        if motion is Motion.LOSE:
            end.end(read, Ending.LOST, "lost")
        elif motion is not Motion.WAIT:
            some = -(-len(read.moves) // 2)
            count = some if motion is Motion.COPY_SOME else len(read.moves)
            for target, source, length_bytes in read.moves[:count]:
                ctypes.memmove(target, source, length_bytes)
            del read.moves[:count]
            if motion is Motion.END:
                end.end(read, Ending.DONE)


class MemoryLink:
    """One end. See `base` and the module. `arrived`, `reads`: the fabric's to change."""

    def __init__(self, fabric: Fabric, clock: Clock):
        self._fabric = fabric
        self._clock = clock
        self._name = ""
        self._registered: list[Range] = []
        self._readable: dict[str, tuple[Range, ...]] = {}  # by peer
        self._tables: dict[int, _Table] = {}
        self._table_count = 0
        self._read_count = 0
        self.reads: dict[int, _Read] = {}
        self.arrived: list[Event] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def transport(self) -> str:
        return "memory" if self._read_count else "none"

    def open(self) -> None:
        self._name = self._clock.random_bytes(12).hex()
        self._fabric.join(self)

    def close(self, timeout_s: float) -> bool:
        self._fabric.leave(self)
        return not self.reads

    def register(self, memory: Range) -> None:
        self._require_open()
        self._registered.append(memory)

    def describe(self, readable: Sequence[Range] = ()) -> bytes:
        self._require_open()
        return msgspec.msgpack.encode(_Description(self._name, tuple(readable)))

    def connect(self, description: bytes) -> str:
        self._require_open()
        try:
            peer = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise IncompatibleError("link.description", "no description of an end") from error
        if peer.name not in self._readable:
            self._fabric.mend(self._name, peer.name)
        self._readable[peer.name] = peer.readable
        return peer.name

    def disconnect(self, peer: str) -> None:
        self._require_open()
        if any(read.peer == peer for read in self.reads.values()):
            raise InternalError("link.disconnect", "a read from this peer is out", peer=peer)
        self._readable.pop(peer, None)
        self._tables = {n: table for n, table in self._tables.items() if table.peer != peer}

    def table(self, peer: str | None, strides: Sequence[Stride]) -> int:
        self._require_open()
        if peer is not None and peer not in self._readable:
            raise UnavailableError("link.peer", "this peer is not connected", peer=peer)
        allowed = self._registered if peer is None else self._readable[peer]
        for stride in strides:
            if not any(r.address <= stride.address and stride.end <= r.end for r in allowed):
                raise IncompatibleError("link.range", "memory that was not described", peer=peer)
        self._table_count += 1
        self._tables[self._table_count] = _Table(peer, tuple(strides))
        return self._table_count

    def drop_table(self, table: int) -> None:
        self._tables.pop(table, None)

    def post(
        self, peer: str, target: int, target_indices: Indices, source: int, source_indices: Indices
    ) -> int:
        self._require_open()
        self._read_count += 1
        read = _Read(self._read_count, peer, [])
        try:
            targets = self._tables[target].pieces(target_indices)
            sources = self._tables[source].pieces(source_indices)
        except LookupError:
            read.refusal = "no such table or index"
        else:
            sizes = [size for _, size in targets], [size for _, size in sources]
            if not targets or sizes[0] != sizes[1]:
                read.refusal = "nothing to read, or pieces that do not match"
            read.moves = [(t, s, n) for (t, n), (s, _) in zip(targets, sources, strict=False)]
        self.reads[read.number] = read
        return read.number

    def notify(self, peer: str, content: bytes) -> bool:
        self._require_open()
        if peer not in self._readable or len(content) > MESSAGE_BYTES_MAX:
            return False
        if not self._fabric.is_alive(peer) or self._fabric.is_cut(self._name, peer):
            return False
        self._fabric.send(self._name, peer, content)
        return True

    def poll(self) -> list[Event]:
        self._require_open()
        self._fabric.step()
        arrived, self.arrived = self.arrived, []
        return arrived

    def end(self, read: _Read, ending: Ending, reason: str = "") -> None:
        """The fabric says that a read has ended."""
        del self.reads[read.number]
        self.arrived.append(ReadEnded(read.number, ending, reason))

    def _require_open(self) -> None:
        if not self._fabric.is_alive(self._name):
            raise ClosedError("link.closed", "this end is not open")
