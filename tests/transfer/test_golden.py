"""Frames of one release are read by the next: a format that changes unseen cuts a deployment in two
while it is upgraded."""

import json
from pathlib import Path

import pytest

from kvferry.transfer.base import Message
from kvferry.transfer.messages import (
    Answer,
    Claim,
    Cut,
    Grant,
    Invite,
    Outcome,
    Place,
    Release,
    Slots,
    State,
    Stop,
    seal_message,
    unseal_message,
)
from kvferry.transfer.params import Offer, appoint, mint, read, read_appointment

GOLDEN = Path(__file__).parent.parent / "golden/transfer_frames.json"
SECRET = b"0123456789abcdef"
OFFER = Offer(b"t" * 16, b"b" * 16, "10.0.0.1", 5600, b"n" * 32, b"k" * 32, 100)
MESSAGES = {
    "claim": Claim("reader", b"description", 7, b"t" * 16, 1, 2, True),
    "grant": Grant("source", 7, b"t" * 16, b"g" * 16, State.HELD, 29.5, 100, ((1, 2), (-1, 4))),
    "release": Release("reader", b"t" * 16, 1, 2),
    "invite": Invite(
        "reader",
        b"description",
        b"t" * 16,
        b"k" * 32,
        Cut(0, ("a", "b"), 2, 4, 64),
        Slots(1 << 40, 1 << 23, 32),
        (Place(7, 3, 192, 200, 5),),
    ),
    "stop": Stop("reader", b"description", b"t" * 16, (7, 8)),
    "answer": Answer(7, Outcome.WRITTEN, (1 << 63, 2)),
}


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_what_they_were(golden, name):
    frame = bytes.fromhex(golden[name])
    assert seal_message(SECRET, "end", MESSAGES[name]) == frame
    assert unseal_message(SECRET, "end", Message("x", frame)) == MESSAGES[name]


def test_appointments_are_what_they_were(golden):
    producer, consumer = appoint(SECRET, OFFER, b"u" * 16)
    assert [producer, consumer] == golden["appointment"]
    offer, reason = read_appointment(SECRET, consumer)
    assert (offer.transfer, offer.key, offer.token_count, reason) == (b"u" * 16, b"", 0, "")
    assert (offer.boot, offer.host, offer.port) == (OFFER.boot, OFFER.host, OFFER.port)
    assert read(SECRET, consumer)[0] is None and read_appointment(SECRET, mint(SECRET, OFFER)) == (
        None,
        "absent",
    )


def test_parameters_are_what_they_were(golden):
    assert mint(SECRET, OFFER) == golden["params"]
    assert read(SECRET, golden["params"]) == (OFFER, "")
