"""What ranks of two engines say to each other beside the reads: claims, grants, releases.

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


Body = Claim | Grant | Release


def seal_message(secret: bytes, receiver: str, body: Body) -> bytes:
    return seal(secret, b"message to " + receiver.encode(), body)


def unseal_message(secret: bytes, receiver: str, message: Message) -> Body:
    """Raises IncompatibleError for anything that is not of ours, for us."""
    context = b"message to " + receiver.encode()
    return unseal(secret, context, message.content, Body, MESSAGE_BYTES_MAX)


def as_tables(tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(table) for table in tables)
