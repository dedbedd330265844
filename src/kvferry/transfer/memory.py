"""The readable link: ends in one process, over memory that the fabric copies piece by piece.

It has the manners of remote memory: a post takes what is there when it gets to a piece, asks
nobody, goes on while its poster looks elsewhere (any end's `poll` moves all of them), and ends when
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
    PostEnded,
    Range,
    Stride,
)


class Motion(Enum):
    """What a read or write does next."""

    WAIT = "wait"
    COPY_SOME = "copy_some"  # half of what is left, at least one piece
    COPY_ALL = "copy_all"  # but it does not say so yet
    END = "end"
    LOSE = "lose"  # a write goes on all the same, whenever `strays` says so


class Schedule(Protocol):
    """Asked whenever something could happen."""

    def moves(self, poster: str, peer: str) -> Motion: ...

    def strays(self, has_rival: bool) -> bool:
        """Whether what is left of a write that was lost lands now. `has_rival`: another write has
        put something into its place meanwhile."""

    def letters(self, sender: str, receiver: str) -> int | None:
        """How often a message arrives now; 0: it is lost; None: it waits."""


class Prompt:
    """Everything at once, nothing lost."""

    def moves(self, poster: str, peer: str) -> Motion:
        return Motion.END

    def strays(self, has_rival: bool) -> bool:
        return True

    def letters(self, sender: str, receiver: str) -> int | None:
        return 1


class _Description(msgspec.Struct, frozen=True, array_like=True):
    name: str
    reachable: tuple[Range, ...]


@dataclass(slots=True)
class _Post:
    number: int
    peer: str
    moves: list[tuple[int, int, int]]  # target, source, bytes: those that are left
    is_write: bool = False
    notice: bytes = b""
    refusal: str = ""


@dataclass(slots=True)
class _Stray:
    """A write that was lost, and goes on."""

    moves: list[tuple[int, int, int]]
    has_rival: bool = False


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
        self._strays: list[_Stray] = []

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
            for post in list(end.posts.values()):
                self._move(end, post)
        self._strays = [stray for stray in self._strays if not self._lands(stray)]

    def _move(self, end: "MemoryLink", post: _Post) -> None:
        if post.refusal:
            end.end(post, Ending.REFUSED, post.refusal)
            return
        if not self.is_alive(post.peer) or self.is_cut(end.name, post.peer):
            end.end(post, Ending.LOST, "the peer is gone")
            return
        motion = self._schedule.moves(end.name, post.peer)
        if motion is Motion.LOSE:
            if post.is_write:
                self._strays.append(_Stray(post.moves))
            end.end(post, Ending.LOST, "lost")
        elif motion is not Motion.WAIT:
            some = -(-len(post.moves) // 2)
            count = some if motion is Motion.COPY_SOME else len(post.moves)
            _copy(post.moves[:count])
            targets = {target for target, _, _ in post.moves[:count]}
            for stray in self._strays if post.is_write else ():
                stray.has_rival |= any(target in targets for target, _, _ in stray.moves)
            del post.moves[:count]
            if motion is Motion.END:
                if post.notice:
                    self.send(end.name, post.peer, post.notice)
                end.end(post, Ending.DONE)

    def _lands(self, stray: _Stray) -> bool:
        """Copies what a lost write had left into whatever is there by then."""
        lands = self._schedule.strays(stray.has_rival)
        if lands:
            _copy(stray.moves)
        return lands


def _copy(moves: Sequence[tuple[int, int, int]]) -> None:
    for target, source, length_bytes in moves:
        ctypes.memmove(target, source, length_bytes)


class MemoryLink:
    """One end. See `base` and the module. `arrived`, `posts`: the fabric's to change."""

    def __init__(self, fabric: Fabric, clock: Clock):
        self._fabric = fabric
        self._clock = clock
        self._name = ""
        self._registered: list[Range] = []
        self._reachable: dict[str, tuple[Range, ...]] = {}  # by peer
        self._tables: dict[int, _Table] = {}
        self._table_count = 0
        self._post_count = 0
        self.posts: dict[int, _Post] = {}
        self.arrived: list[Event] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def transport(self) -> str:
        return "memory" if self._post_count else "none"

    def open(self) -> None:
        self._name = self._clock.random_bytes(12).hex()
        self._fabric.join(self)

    def close(self, timeout_s: float) -> bool:
        self._fabric.leave(self)
        return not self.posts

    def register(self, memory: Range) -> None:
        self._require_open()
        self._registered.append(memory)

    def describe(self, reachable: Sequence[Range] = ()) -> bytes:
        self._require_open()
        return msgspec.msgpack.encode(_Description(self._name, tuple(reachable)))

    def connect(self, description: bytes) -> str:
        self._require_open()
        try:
            peer = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise IncompatibleError("link.description", "no description of an end") from error
        if peer.name not in self._reachable:
            self._fabric.mend(self._name, peer.name)
        self._reachable[peer.name] = peer.reachable
        return peer.name

    def disconnect(self, peer: str) -> None:
        self._require_open()
        if any(post.peer == peer for post in self.posts.values()):
            raise InternalError("link.disconnect", "a post to this peer is out", peer=peer)
        self._reachable.pop(peer, None)
        self._tables = {n: table for n, table in self._tables.items() if table.peer != peer}

    def table(self, peer: str | None, strides: Sequence[Stride]) -> int:
        self._require_open()
        if peer is not None and peer not in self._reachable:
            raise UnavailableError("link.peer", "this peer is not connected", peer=peer)
        allowed = self._registered if peer is None else self._reachable[peer]
        for stride in strides:
            if not any(r.address <= stride.address and stride.end <= r.end for r in allowed):
                raise IncompatibleError("link.range", "memory that was not described", peer=peer)
        self._table_count += 1
        self._tables[self._table_count] = _Table(peer, tuple(strides))
        return self._table_count

    def drop_table(self, table: int) -> None:
        self._tables.pop(table, None)

    def post(
        self,
        peer: str,
        target: int,
        target_indices: Indices,
        source: int,
        source_indices: Indices,
        notice: bytes = b"",
    ) -> int:
        self._require_open()
        self._post_count += 1
        post = _Post(self._post_count, peer, [], notice=notice)
        try:
            post.is_write = self._is_write(peer, target, source)
            targets = self._tables[target].pieces(target_indices)
            sources = self._tables[source].pieces(source_indices)
        except LookupError:
            post.refusal = "no such table or index"
        else:
            sizes = [size for _, size in targets], [size for _, size in sources]
            if not targets or sizes[0] != sizes[1]:
                post.refusal = "nothing to move, or pieces that do not match"
            post.moves = [(t, s, n) for (t, n), (s, _) in zip(targets, sources, strict=False)]
        self.posts[post.number] = post
        return post.number

    def _is_write(self, peer: str, target: int, source: int) -> bool:
        """LookupError unless one table is of own memory and the other of the peer's."""
        owners = self._tables[target].peer, self._tables[source].peer
        if owners not in ((None, peer), (peer, None)):
            raise LookupError
        return owners[1] is None

    def notify(self, peer: str, content: bytes) -> bool:
        self._require_open()
        if peer not in self._reachable or len(content) > MESSAGE_BYTES_MAX:
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

    def end(self, post: _Post, ending: Ending, reason: str = "") -> None:
        """The fabric says that a read or write has ended."""
        del self.posts[post.number]
        self.arrived.append(PostEnded(post.number, ending, reason))

    def _require_open(self) -> None:
        if not self._fabric.is_alive(self._name):
            raise ClosedError("link.closed", "this end is not open")
