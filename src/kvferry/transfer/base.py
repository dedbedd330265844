"""Contract of a link: reads and writes of a peer's memory without its help, and small messages.

A link is one end: what a rank is to other ranks. Its life:

1. `open` takes a name that no other end ever had, also not the one before it in this place.
2. `register` makes own memory reachable; `describe` says to a peer how to reach this end and which
   ranges of it: nothing else can be addressed with it.
3. `connect` takes the description of a peer, `table` prepares pieces of its memory, or of own
   memory, so that a post only names indices.
4. `post` begins a read (into own memory) or a write (out of it). From then on the own pieces belong
   to it until `poll` has returned its `PostEnded`. **It cannot be called back.** It has no
   deadline, it may stall as long as the peer does and then go on. Whoever must not wait longer
   forgets it and keeps its own pieces out of use.
5. `disconnect` forgets a peer. While anything posted to it is out that is an InternalError.

What moves is what the memory held while it was moved, piece by piece: a link does not know whether
its owner had given that memory to somebody else. Messages may be lost, come twice, late, in any
order, and from anybody: their sender is a hint. Only the notice of a write has an order: it comes
after all bytes of the write, if it comes.

Threads: one thread owns a link; `open` and `register` may come from another one before. Calls may
take tens of milliseconds, and `post` longer where the transport copies inside of it: never on an
engine's thread.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MESSAGE_BYTES_MAX = 1 << 20
"""The longest message."""


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive bytes at an absolute address."""

    address: int
    length_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.length_bytes


@dataclass(frozen=True, slots=True)
class Stride:
    """`count` pieces of `piece_bytes`, `stride_bytes` from one to the next."""

    address: int
    piece_bytes: int
    stride_bytes: int
    count: int

    @property
    def end(self) -> int:
        return self.address + (self.count - 1) * self.stride_bytes + self.piece_bytes


class Ending(Enum):
    """How a read or write ended. After any of them nothing of it moves any more, as far as the
    transport can tell: of LOST that is not proven, so own pieces rest for a while."""

    DONE = "done"
    LOST = "lost"  # the peer or the way to it is gone; some pieces may have been written
    REFUSED = "refused"  # it never began


@dataclass(frozen=True, slots=True)
class PostEnded:
    """Each read or write that `post` began gets exactly one. `reason`: for people."""

    post: int
    ending: Ending
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """`sender`: the name of an end, as the transport says: not proven."""

    sender: str
    content: bytes


Event = PostEnded | Message
Indices = array
"""`array("i")`: indices into a table, counted over all pieces of its strides in order."""


class Link(Protocol):
    """See the module. Constructors only store; `open` acquires; `close` is idempotent."""

    @property
    def name(self) -> str:
        """Of this end, from `open` on."""

    @property
    def transport(self) -> str:
        """What the last post went by, for people; "none" before the first one."""

    def open(self) -> None:
        """ConfigError where the transport is not there: says what to install."""

    def close(self, timeout_s: float) -> bool:
        """Waits for posts that are out. False if some still are: own pieces of theirs must stay
        mapped as long as the process lives."""

    def register(self, memory: Range) -> None:
        """Few, large ranges. They must stay mapped until `close`."""

    def describe(self, reachable: Sequence[Range] = ()) -> bytes:
        """How to reach this end, and these ranges, each exactly as it was registered. Whoever has
        the description can read and write them."""

    def connect(self, description: bytes) -> str:
        """The peer's name. Idempotent. IncompatibleError for bytes that are no description,
        UnavailableError where the transport cannot (may pass)."""

    def disconnect(self, peer: str) -> None:
        """Forgets the peer and its tables. No error if it is not known."""

    def table(self, peer: str | None, strides: Sequence[Stride]) -> int:
        """Prepares pieces of a peer's memory (None: own) to be named by index. IncompatibleError
        if one is not in a range that was described or registered, UnavailableError for a peer
        that is not connected. Own tables live until `close`."""

    def drop_table(self, table: int) -> None:
        """Forgets a table of own memory that no post uses."""

    def post(
        self,
        peer: str,
        target: int,
        target_indices: Indices,
        source: int,
        source_indices: Indices,
        notice: bytes = b"",
    ) -> int:
        """Begins to move source pieces into target pieces of the same sizes, pairwise; returns the
        number of the post. One of the two tables is of own memory: a target there makes it a read,
        a source there a write. `notice`: of a write, a message to the peer (at most
        MESSAGE_BYTES_MAX) that arrives after all its bytes, if it arrives. What is wrong with a
        post comes as its ending."""

    def notify(self, peer: str, content: bytes) -> bool:
        """Sends a message, best effort. False if it surely was not sent."""

    def poll(self) -> list[Event]:
        """What has happened since the last call. Never waits."""
