"""The listener: whatever arrives, the next peer is answered; and nobody learns anything without
the secret."""

import contextlib
import socket
import threading

import pytest

from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, IncompatibleError, UnavailableError
from kvferry.testing.kv_memory import EngineShape, GroupModel, engine_memory, rank_layouts
from kvferry.testing.tally import Tally
from kvferry.transfer.compatibility import Compatibility, agree
from kvferry.transfer.frames import seal
from kvferry.transfer.handshake import (
    CONNECTIONS_MAX,
    LENGTH,
    Ask,
    Hello,
    Listener,
    RankEnd,
    check_addresses,
    dial,
)
from kvferry.transfer.settings import Settings

SECRET = b"0123456789abcdef"
BOOT = b"b" * 16
MINE = Compatibility({"model": "m", "kv_dtype": "bfloat16"})
SETTINGS = Settings(secret=SECRET, dial_timeout_s=60.0)
SHAPE = EngineShape(1, (4,), (1,), ("LBHN",), 8)
(LAYOUT,) = rank_layouts(engine_memory([GroupModel(("a",), 1)], SHAPE))


@pytest.fixture
def tally():
    return Tally()


@pytest.fixture
def listener(tally):
    listener = Listener(SETTINGS, BOOT, MINE, SystemClock(), tally)
    listener.open()
    listener.serve((RankEnd(LAYOUT, b"link 1"),))
    yield listener
    assert listener.is_alive
    assert ask(listener).ranks
    listener.close()
    listener.close()


def ask(listener, boot=BOOT, mine=MINE, settings=SETTINGS, host="127.0.0.1"):
    return dial(host, listener.port, boot, mine, settings, SystemClock())


def test_a_reader_learns_all_ranks(listener):
    assert ask(listener).ranks == (RankEnd(LAYOUT, b"link 1"),)


def test_a_later_reader_learns_what_is_true_then(listener):
    listener.serve((RankEnd(LAYOUT, b"link 2"),))
    assert ask(listener, host="localhost").ranks[0].description == b"link 2"


def test_other_addresses_than_ipv4(tally):
    """A literal with colons, and whatever a name leads to."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    settings = Settings(secret=SECRET, bind_host="::1", advertise_host="::1")
    listener = Listener(settings, BOOT, MINE, SystemClock(), tally)
    try:
        listener.open()
    except ConfigError:
        pytest.skip("no IPv6 here")
    listener.serve((RankEnd(LAYOUT, b"link 1"),))
    assert ask(listener, host="::1").ranks
    listener.close()


def answer(stream):
    """All that comes until the other side hangs up."""
    stream.settimeout(60.0)
    received = b""
    try:
        while piece := stream.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


JUNK = [
    b"",
    b"x",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xff\xff\xff" + b"x" * 100,
    LENGTH.pack(100) + b"x" * 100,
    LENGTH.pack(0),
    LENGTH.pack(40) + b"kvfx\x01\0\0\0" + bytes(32),
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_foreign_packets_end_their_connection_only(listener, junk):
    with socket.create_connection(("127.0.0.1", listener.port)) as stream:
        stream.sendall(junk)
        with contextlib.suppress(OSError):  # it may have hung up already
            stream.shutdown(socket.SHUT_WR)
        assert answer(stream) == b""


FRAME = seal(SECRET, b"hello", Hello(b"n", MINE))
STRANGERS = {
    "nothing": b"",
    "half a frame": LENGTH.pack(200) + b"kvfx",
    "a gigabyte": LENGTH.pack(1 << 30) + b"x",
    "a recorded hello": LENGTH.pack(len(FRAME)) + FRAME,
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_connections_that_stay_do_not_keep_peers_out(listener, words):
    """Their own deadline is a minute: the peer has its answer before any of them is given up."""
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * CONNECTIONS_MAX):
            stream = socket.create_connection(("127.0.0.1", listener.port))
            strangers.enter_context(stream)
            with contextlib.suppress(OSError):  # it has given way already
                stream.sendall(words)
        assert ask(listener).ranks


def test_without_a_thread_the_listener_lives_on(listener, monkeypatch, tally):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(CONNECTIONS_MAX + 1):
            with pytest.raises(UnavailableError):
                ask(listener)
    assert tally["handshakes_served_total.busy"] == CONNECTIONS_MAX + 1


def test_who_does_not_know_the_secret_learns_nothing(listener, tally):
    stranger = Settings(secret=b"another secret..", dial_timeout_s=60.0)
    with pytest.raises(UnavailableError):
        ask(listener, settings=stranger)
    with socket.create_connection(("127.0.0.1", listener.port)) as stream:
        frame = seal(b"another secret..", b"hello", Hello(b"n", MINE))
        stream.sendall(LENGTH.pack(len(frame)) + frame)
        assert answer(stream) == b""


def test_an_ask_of_another_handshake_is_worth_nothing(listener):
    """Recorded frames open nothing: each handshake has nonces of its own."""
    with socket.create_connection(("127.0.0.1", listener.port)) as stream:
        for context, body in ((b"hello", Hello(b"n", MINE)), (b"ask" + b"n" + b"old", Ask(BOOT))):
            frame = seal(SECRET, context, body)
            stream.sendall(LENGTH.pack(len(frame)) + frame)
        assert b"link 1" not in answer(stream)


def test_a_producer_that_was_restarted_is_no_longer_that_producer(listener):
    with pytest.raises(UnavailableError, match="restarted"):
        ask(listener, boot=b"c" * 16)


def test_what_differs_is_named(listener):
    with pytest.raises(IncompatibleError, match="kv_dtype: 'fp8', not 'bfloat16'"):
        ask(listener, mine=Compatibility({"model": "m", "kv_dtype": "fp8"}))


def test_a_producer_without_ranks_says_that_it_is_not_ready(listener):
    listener.serve(())
    with pytest.raises(IncompatibleError, match="not ready"):
        ask(listener)
    listener.serve((RankEnd(LAYOUT, b"link 1"),))


def test_nobody_there_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnavailableError):
        dial("127.0.0.1", port, BOOT, MINE, SETTINGS, SystemClock())


def test_an_address_that_is_taken_is_an_error_at_once(listener, tally):
    taken = Settings(secret=SECRET, bind_port=listener.port)
    with pytest.raises(ConfigError, match="bind_port"):
        Listener(taken, BOOT, MINE, SystemClock(), tally).open()


@pytest.mark.parametrize(
    ("bind", "advertise", "secret", "key"),
    [
        ("0.0.0.0", "10.0.0.1", b"", "secret"),
        ("::", "10.0.0.1", b"", "secret"),
        ("0.0.0.0", "0.0.0.0", SECRET, "advertise_host"),
        ("0.0.0.0", "localhost", SECRET, "advertise_host"),
        ("10.0.0.1", "127.0.0.1", SECRET, "advertise_host"),
    ],
)
def test_addresses_that_are_unsafe_or_lead_nowhere(bind, advertise, secret, key):
    with pytest.raises(ConfigError) as refused:
        check_addresses(Settings(bind_host=bind, advertise_host=advertise, secret=secret))
    assert refused.value.context["key"] == key


def test_releases_that_share_a_protocol_work_together():
    """A rolling upgrade: the new one still speaks the old version."""
    old = Compatibility({"m": 1}, 1, 1, 0b01)
    new = Compatibility({"m": 1}, 1, 3, 0b11)
    assert (agree(old, new).protocol, agree(new, old).capabilities) == (1, 0b01)
    with pytest.raises(IncompatibleError, match="protocol 2 to 3"):
        agree(old, Compatibility({"m": 1}, 2, 3))
