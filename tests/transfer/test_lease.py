"""A reader that believes blocks to be kept while they are not gets another user's text; a lease
that nobody ends keeps blocks for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.testing.clock import ManualClock
from kvferry.transfer.lease import CLOCK_DRIFT_MAX, HeldUntil, LeaseBook
from kvferry.transfer.messages import Claim, Release, State
from kvferry.transfer.settings import Settings

A, B = b"a" * 16, b"b" * 16
SETTINGS = Settings(lease_s=10.0, lease_total_s=25.0, early_s=2.0)
TABLES = ((1, 2, 3),)


def claim(transfer=A, serial=1, wants_tables=False, reader=0, sender="reader"):
    return Claim(sender, b"", serial, transfer, reader, 1, wants_tables)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def book(clock):
    return LeaseBook(SETTINGS, clock)


def begin(book, transfer=A):
    return book.begin(f"request {transfer[:1].decode()}", transfer, b"g" * 16, 48, TABLES)


def test_a_claim_is_answered_with_tables_once_asked_for(book):
    begin(book)
    grant = book.claim(claim(wants_tables=True))
    assert (grant.state, grant.tables, grant.token_count) == (State.HELD, TABLES, 48)
    assert book.claim(claim()).tables == ()


def test_a_lease_without_a_reader_ends_by_itself(book, clock):
    begin(book)
    clock.advance(10.0)
    book.expire()
    assert book.take_ended() == []
    clock.advance(0.001)
    book.expire()
    assert book.take_ended() == [("request a", "expired")]
    assert book.take_ended() == []
    assert book.claim(claim()).state is State.GONE


def test_claims_prolong_and_what_was_said_holds(book, clock):
    begin(book)
    for _ in range(2):
        clock.advance(9.0)
        assert book.claim(claim()).valid_s == pytest.approx(min(10.0, 1019 + 6 - clock.now_s(), 10))
    valid_s = book.claim(claim()).valid_s
    clock.advance(valid_s)
    book.expire()
    assert book.lease_count == 1


def test_a_reader_that_never_stops_does_not_keep_blocks_for_ever(book, clock):
    begin(book)
    for _ in range(100):
        clock.advance(1.0)
        book.claim(claim())
    assert book.take_ended() == [("request a", "expired")]


def test_all_readers_must_have_released(book):
    begin(book)
    book.release(Release("rank 0", A, 0, 2))
    book.release(Release("rank 0", A, 0, 2))
    assert book.take_ended() == []
    book.release(Release("rank 1", A, 1, 2))
    assert book.take_ended() == [("request a", "released")]


def test_one_consumer_does_not_end_what_another_was_promised(book, clock):
    """A client may carry one offer to two consumers."""
    begin(book)
    book.claim(claim(sender="first"))
    book.claim(claim(sender="second"))
    book.release(Release("first", A, 0, 1))
    assert book.take_ended() == []
    book.release(Release("second", A, 0, 1))
    assert book.take_ended() == [("request a", "released")]


def test_messages_before_their_lease_wait_for_it(book, clock):
    """The engine tells its ranks with the next step; a reader may be faster."""
    early = claim(wants_tables=True)
    assert book.claim(early) is None
    book.release(Release("reader", B, 0, 1))
    ((answered, grant),) = begin(book)
    assert (answered, grant.state, grant.tables) == (early, State.HELD, TABLES)
    begin(book, B)
    assert book.take_ended() == [("request b", "released")]


def test_a_claim_whose_lease_never_comes_is_told_so(book, clock):
    assert book.claim(claim()) is None
    clock.advance(2.1)
    assert book.claim(claim(B)) is None
    ((_, grant),) = book.expire()
    assert (grant.transfer, grant.state) == (A, State.GONE)


def test_strangers_do_not_fill_the_memory(book):
    for number in range(10_000):
        book.claim(claim(number.to_bytes(16, "big")))
    for _ in range(1000):
        book.claim(claim())
    assert len(book._early) <= 4096
    assert len(book._early[A]) <= 64


RATES = st.floats(1 - CLOCK_DRIFT_MAX / 2.1, 1 + CLOCK_DRIFT_MAX / 2.1)


@given(RATES, RATES, st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4), st.floats(0, 4))))
def test_a_reader_is_never_surer_than_the_source(source_rate, reader_rate, rounds):
    """Whatever the clocks show, the two rates and the times on the way."""
    source, reader = ManualClock(start_s=7.0), ManualClock(start_s=1e6)
    book, held = LeaseBook(SETTINGS, source), HeldUntil()

    def pass_time(true_s):
        source.advance(true_s * source_rate)
        reader.advance(true_s * reader_rate)

    begin(book)
    for serial, (before_s, there_s, back_s) in enumerate(rounds):
        pass_time(before_s)
        held.asked(serial, reader.now_s())
        pass_time(there_s)
        grant = book.claim(claim(serial=serial))
        pass_time(back_s)
        if grant.state is State.HELD:
            held.granted(serial, grant.valid_s)
        book.expire()
        assert not (held.is_sure(reader.now_s()) and book.lease_count == 0)
    for _ in range(200):
        pass_time(0.1)
        book.expire()
        assert not (held.is_sure(reader.now_s()) and book.lease_count == 0)


def test_an_answer_is_taken_once():
    held = HeldUntil()
    held.asked(1, 100.0)
    held.asked(2, 105.0)
    assert held.granted(2, 10.0)
    assert not held.granted(2, 1000.0)
    assert not held.granted(1, 1000.0)
    assert held.is_sure(114.0)
    assert not held.is_sure(115.0)
