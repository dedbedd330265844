"""What ranks of two engines say to each other: claims, grants, releases; where the producer writes,
also invitations, stops and answers.

Each may be lost, come twice, late or in any order, so each says all that it means, and saying it
again changes nothing. A frame is good for one receiver only: its context is the receiver's name.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from kvferry.transfer.base import MESSAGE_BYTES_MAX, Message
from kvferry.transfer.frames import seal, unseal


class State(Enum):
    """Of a transfer at the producer, as a grant tells it."""

    HELD = "held"
    GONE = "gone"  # released, expired, or never heard of


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """Reader to source: keep these blocks for me, and say how long you surely do. Also the renewal,
    and the question whether what was read was still valid.

    `sender` and `description`: the reader's end, so that it can be answered. `serial`: the answer
    repeats it. `reader`, of `reader_count` that the source will hear from.
    """

    sender: str
    description: bytes
    serial: int
    transfer: bytes
    reader: int
    reader_count: int
    wants_tables: bool


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """Source to reader. `valid_s`: for so long after this was said the blocks are not freed.
    `tables`: block ids by group, `plan.SKIP` where there is none, if asked for."""

    sender: str
    serial: int
    transfer: bytes
    generation: bytes
    state: State
    valid_s: float
    token_count: int
    tables: tuple[tuple[int, ...], ...] = ()


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Reader to source: I need these blocks no more."""

    sender: str
    transfer: bytes
    reader: int
    reader_count: int


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """What a page holds of a source rank: these layers of its group `group`, in this order, these
    heads, `chunk_tokens` tokens from a multiple of that on. In the order of `layout`."""

    group: int
    layers: tuple[str, ...]
    first_head: int
    head_count: int
    chunk_tokens: int


class Slots(msgspec.Struct, frozen=True, array_like=True):
    """The reader's staging, all of it, as its link describes it."""

    address: int
    slot_bytes: int
    count: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one page goes. `number`: never used again by this reader. `chunk`: of the cut;
    tokens [start, end) of it are wanted. `slot`: of the reader's staging, the source's until it has
    answered."""

    number: int
    chunk: int
    start_token: int
    end_token: int
    slot: int


class Invite(msgspec.Struct, frozen=True, array_like=True, tag="invite"):
    """Reader to source: write these pages. `key`: of the transfer's tokens, as the reader knows
    them. `description`: of the reader's end, as in a claim, with its staging."""

    sender: str
    description: bytes
    transfer: bytes
    key: bytes
    cut: Cut
    slots: Slots
    places: tuple[Place, ...]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Reader to source: do not write these, and say for each when that is sure."""

    sender: str
    description: bytes
    transfer: bytes
    numbers: tuple[int, ...]


class Outcome(Enum):
    """Of an invitation. After any of them the source writes nothing there any more."""

    WRITTEN = "written"
    NOT_WRITTEN = "not_written"  # it never began
    LOST = "lost"  # the transport does not know


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Source to reader. `checksums`: of the page's slices (docs/formats.md), if it was written."""

    number: int
    outcome: Outcome
    checksums: tuple[int, ...] = ()


Body = Claim | Grant | Release | Invite | Stop | Answer


def seal_message(secret: bytes, receiver: str, body: Body) -> bytes:
    return seal(secret, b"message to " + receiver.encode(), body)


def unseal_message(secret: bytes, receiver: str, message: Message) -> Body:
    """Raises IncompatibleError for anything that is not of ours, for us."""
    context = b"message to " + receiver.encode()
    return unseal(secret, context, message.content, Body, MESSAGE_BYTES_MAX)


def as_tables(tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(table) for table in tables)
