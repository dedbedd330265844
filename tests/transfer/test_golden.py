"""Frames of one release are read by the next: a format that changes unseen cuts a deployment in two
while it is upgraded."""

import json
from pathlib import Path

import pytest

from kvferry.transfer.base import Message
from kvferry.transfer.messages import Claim, Grant, Release, State, seal_message, unseal_message
from kvferry.transfer.params import Offer, mint, read

GOLDEN = Path(__file__).parent.parent / "golden/transfer_frames.json"
SECRET = b"0123456789abcdef"
OFFER = Offer(b"t" * 16, b"b" * 16, "10.0.0.1", 5600, b"n" * 32, b"k" * 32, 100)
MESSAGES = {
    "claim": Claim("reader", b"description", 7, b"t" * 16, 1, 2, True),
    "grant": Grant("source", 7, b"t" * 16, b"g" * 16, State.HELD, 29.5, 100, ((1, 2), (-1, 4))),
    "release": Release("reader", b"t" * 16, 1, 2),
}


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_what_they_were(golden, name):
    frame = bytes.fromhex(golden[name])
    assert seal_message(SECRET, "end", MESSAGES[name]) == frame
    assert unseal_message(SECRET, "end", Message("x", frame)) == MESSAGES[name]


def test_parameters_are_what_they_were(golden):
    assert mint(SECRET, OFFER) == golden["params"]
    assert read(SECRET, golden["params"]) == (OFFER, "")
