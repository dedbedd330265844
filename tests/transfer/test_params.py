"""A client that invents, changes or replays parameters gets a local prefill, and never an engine
that connects where it was told to, reads what is not its own, or dies."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import IncompatibleError
from kvferry.transfer.base import Message
from kvferry.transfer.frames import HEAD_BYTES, seal, unseal
from kvferry.transfer.messages import Release, seal_message, unseal_message
from kvferry.transfer.params import FIELD, Offer, mint, read, wants_remote_decode

SECRET = b"0123456789abcdef"
OFFER = Offer(b"t" * 16, b"b" * 16, "10.0.0.1", 5600, b"n" * 32, b"k" * 32, 100)


def test_what_was_minted_is_read():
    assert read(SECRET, mint(SECRET, OFFER)) == (OFFER, "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(JSON, st.dictionaries(st.sampled_from([FIELD, "do_remote_prefill", "host"]), JSON))
def test_nothing_that_a_client_sends_is_taken_or_raises(params, more):
    for sent in (params, more):
        offer, reason = read(SECRET, sent)
        assert offer is None and reason
        wants_remote_decode(sent)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_changed_byte_goes_unseen(data):
    record = base64.urlsafe_b64decode(mint(SECRET, OFFER)[FIELD])
    at = data.draw(st.integers(0, len(record) - 1))
    flip = data.draw(st.integers(1, 255))
    changed = record[:at] + bytes([record[at] ^ flip]) + record[at + 1 :]
    params = {FIELD: base64.urlsafe_b64encode(changed).decode()}
    assert read(SECRET, params)[0] is None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "absent"),
        ({}, "absent"),
        ({"do_remote_prefill": False}, "absent"),
        ({"do_remote_prefill": True, "remote_host": "169.254.169.254"}, "unsigned"),
        ({FIELD: 7}, "malformed"),
        ({FIELD: "ü"}, "malformed"),
        ({FIELD: "x" * 100_000}, "malformed"),
        ({FIELD: base64.b64encode(b"x" * 90).decode()}, "forged"),
        (mint(b"another secret..", OFFER), "forged"),
        (mint(b"", OFFER), "forged"),
    ],
)
def test_the_reason_is_told(params, reason):
    assert read(SECRET, params) == (None, reason)


def test_without_a_secret_nothing_is_taken():
    assert read(b"", mint(b"", OFFER)) == (None, "forged")


def test_an_offer_of_the_wrong_shape_is_none():
    short = Offer(b"t", b"b" * 16, "h", 1, b"", b"", 1)
    assert read(SECRET, mint(SECRET, short)) == (None, "malformed")


def test_a_message_is_good_for_its_receiver_only():
    """One for the producer's previous boot must not release what the present one holds."""
    body = Release("reader", b"t" * 16, 0, 1)
    frame = seal_message(SECRET, "boot 1", body)
    assert unseal_message(SECRET, "boot 1", Message("any", frame)) == body
    with pytest.raises(IncompatibleError) as refused:
        unseal_message(SECRET, "boot 2", Message("any", frame))
    assert refused.value.kind == "frame.forged"


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (b"", "frame.size"),
        (b"x" * (HEAD_BYTES - 1), "frame.size"),
        (b"x" * 2000, "frame.size"),
        (b"x" * 100, "frame.foreign"),
        (b"kvfx\x02" + b"x" * 100, "frame.version"),
        (b"kvfx\x01\0\0\0" + b"x" * 100, "frame.forged"),
        (seal(SECRET, b"here", OFFER), "frame.malformed"),
    ],
)
def test_frames_that_are_none(frame, kind):
    with pytest.raises(IncompatibleError) as refused:
        unseal(SECRET, b"here", frame, Release, 1000)
    assert refused.value.kind == kind
