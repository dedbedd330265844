"""The scheduler halves: every request has one way to be answered, whatever it brings; blocks are
kept for those that may read them and for nobody else."""

import pytest

pytest.importorskip("kvferry._native", reason="keys of prompts need the native extension")

from kvferry.catalog.runner import Runner
from kvferry.errors import ConfigError
from kvferry.keys import ROOT_PARENT, chunk_key
from kvferry.metrics import Metrics
from kvferry.testing.clock import ManualClock
from kvferry.testing.tally import Tally
from kvferry.transfer.consumer import Consumer
from kvferry.transfer.halves import Report
from kvferry.transfer.params import FIELD, read
from kvferry.transfer.producer import Identity, Prefix, Producer, prefix_key
from kvferry.transfer.settings import Settings, check_settings

SECRET = b"0123456789abcdef"
NAMESPACE = b"n" * 32
SETTINGS = Settings(secret=SECRET, leased_blocks_max=10, tokens_min=16, claim_deadline_s=5.0)
TOKENS = tuple(range(100))
TABLES = (tuple(range(7)),)
WANTED = {"do_remote_decode": True}


@pytest.fixture
def clock():
    return ManualClock()


def make_producer(clock, settings=SETTINGS):
    return Producer(settings, clock, Tally(), Identity(b"b" * 16, NAMESPACE), 5600)


class Scheduler:
    """One consumer with two ranks."""

    def __init__(self, clock):
        self.clock, self.tally = clock, Tally()
        self.runner = Runner(clock, Metrics())
        self.consumer = Consumer(SETTINGS, clock, self.tally, self.runner, NAMESPACE, 2)
        self.producer = make_producer(clock)

    def offer(self, tokens=TOKENS, extras=b""):
        params = self.producer.finished(str(id(object())), WANTED, Prefix(tokens, extras), TABLES)
        self.producer.ended(list(self.producer._held_blocks))
        return params

    def arrive(self, params, tokens=TOKENS, extras=b""):
        self.consumer.on_new_request("r", params, Prefix(tokens, extras))
        self.runner.step()
        return self.consumer.plan()

    def ready(self):
        (watch,) = self.arrive(self.offer()).watches
        assert self.consumer.matched("r", 0) is None
        self.consumer.receive(Report(granted=("r",)).merge(Report(granted=("r",))))
        return watch


@pytest.fixture
def scheduler(clock):
    return Scheduler(clock)


def test_the_key_is_that_of_the_reference():
    prefix = Prefix(TOKENS, b"salt")
    assert prefix_key(NAMESPACE, prefix, 50) == chunk_key(
        NAMESPACE, ROOT_PARENT, TOKENS[:50], b"salt"
    )


def test_what_is_kept_is_capped_and_then_simply_not_offered(clock):
    """A producer whose readers are slow must not run out of KV cache."""
    producer = make_producer(clock)
    assert producer.finished("a", WANTED, Prefix(TOKENS), TABLES)
    assert producer.finished("b", WANTED, Prefix(TOKENS), TABLES) is None
    assert not producer.may_reset()
    (hold,) = producer.plan().holds
    assert (hold.request_id, hold.tables) == ("a", TABLES)
    producer.ended(["a", "of another connector"])
    assert producer.may_reset()
    assert producer.finished("c", WANTED, Prefix(TOKENS), TABLES)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": "yes"}, [], "x"])
def test_nothing_is_kept_that_nobody_asked_for(clock, params):
    producer = make_producer(clock)
    assert producer.finished("a", params, Prefix(TOKENS), TABLES) is None
    assert producer.held_block_count == 0


def test_without_a_secret_nothing_is_offered(clock):
    assert make_producer(clock, Settings()).finished("a", WANTED, Prefix(TOKENS), TABLES) is None


def test_two_offers_have_nothing_in_common_to_guess_from(clock):
    producer = make_producer(clock, Settings(secret=SECRET))
    offers = [
        read(SECRET, producer.finished(name, WANTED, Prefix(TOKENS), TABLES))[0] for name in "ab"
    ]
    assert offers[0].transfer != offers[1].transfer


def test_all_ranks_must_have_it_before_tokens_are_promised(scheduler):
    scheduler.arrive(scheduler.offer())
    scheduler.consumer.receive(Report(granted=("r",)))
    assert scheduler.consumer.matched("r", 0) is None
    scheduler.consumer.receive(Report(granted=("r",)))
    assert scheduler.consumer.matched("r", 0) == 99
    assert scheduler.consumer.matched("r", 32) == 67


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"tokens": (5, *TOKENS[1:])}, "other_text"),
        ({"extras": b"salt"}, "other_text"),
        ({"tokens": TOKENS[:99]}, "tokens"),
    ],
)
def test_an_offer_for_other_tokens_is_computed_here(scheduler, change, outcome):
    """A client that replays somebody's parameters must not get his answer."""
    assert scheduler.arrive(scheduler.offer(), **change).watches == ()
    assert scheduler.consumer.matched("r", 0) == 0
    assert scheduler.tally[f"requests_total.{outcome}"] == 1
    assert scheduler.consumer.finished("r") is False


def test_an_offer_of_another_model_is_computed_here(scheduler):
    scheduler.producer = Producer(
        SETTINGS, scheduler.clock, Tally(), Identity(b"b" * 16, b"m" * 32), 5600
    )
    assert scheduler.arrive(scheduler.offer()).watches == ()
    assert scheduler.tally["requests_total.namespace"] == 1


def test_what_a_client_invents_leads_nowhere(scheduler):
    for params in ({"do_remote_prefill": True}, {FIELD: 5}, {FIELD: "x"}, [1], "x", 7):
        assert scheduler.arrive(params).watches == ()
        assert scheduler.consumer.matched("r", 0) == 0
        assert scheduler.consumer.allocated("r", TABLES, 0, 0) is False
        assert scheduler.consumer.finished("r") is False


@pytest.mark.parametrize(("computed", "outcome"), [(100, "local_hit"), (90, "short")])
def test_what_is_here_already_is_not_fetched_and_the_producer_is_told(scheduler, computed, outcome):
    scheduler.ready()
    assert scheduler.consumer.matched("r", computed) == 0
    assert scheduler.consumer.plan().drops == ("r",)
    assert scheduler.tally[f"requests_total.{outcome}"] == 1
    assert scheduler.consumer.allocated("r", TABLES, computed, 0) is False


def test_a_load_from_admission_to_its_end(scheduler):
    scheduler.ready()
    assert scheduler.consumer.allocated("r", TABLES, 32, 68) is True
    (load,) = scheduler.consumer.plan().loads
    assert (load.start_token, load.end_token, load.tables) == (32, 100, TABLES)
    assert scheduler.consumer.matched("r", 0) == 0
    scheduler.consumer.loaded(["r", "of another connector"], [])
    assert scheduler.consumer.finished("r") is False
    assert scheduler.consumer.record_count == 0


def test_an_abort_while_loading_waits_for_the_ranks(scheduler):
    scheduler.ready()
    scheduler.consumer.allocated("r", TABLES, 0, 100)
    scheduler.consumer.plan()
    assert scheduler.consumer.finished("r") is True
    assert scheduler.consumer.plan().drops == ("r",)
    scheduler.consumer.loaded(["r"], ["r"])
    assert scheduler.consumer.finished("r") is False


def test_an_offer_that_another_connector_beat_is_let_go(scheduler):
    scheduler.ready()
    assert scheduler.consumer.allocated("r", TABLES, 0, 0) is False
    assert scheduler.consumer.plan().drops == ("r",)


def test_a_refusal_becomes_an_ordinary_request(scheduler):
    scheduler.arrive(scheduler.offer())
    scheduler.consumer.receive(Report(refused=(("r", "gone"), ("x", "gone"))))
    assert scheduler.consumer.matched("r", 0) == 0
    assert scheduler.consumer.plan().drops == ("r",)


def test_nobody_waits_longer_than_the_deadline(scheduler):
    """Neither for ranks that do not answer nor for the runner's thread."""
    scheduler.consumer.on_new_request("r", scheduler.offer(), Prefix(TOKENS))
    assert scheduler.consumer.matched("r", 0) is None
    scheduler.clock.advance(5.1)
    assert scheduler.consumer.matched("r", 0) == 0
    scheduler.runner.step()
    scheduler.arrive(scheduler.offer())
    assert scheduler.consumer.matched("r", 0) is None
    scheduler.clock.advance(5.1)
    scheduler.consumer.plan()
    assert scheduler.consumer.matched("r", 0) == 0
    assert scheduler.consumer.plan().drops == ("r",)


def test_new_weights_take_nothing_from_old_ones(scheduler):
    scheduler.ready()
    params = scheduler.offer()
    scheduler.consumer.rename(b"w" * 32)
    assert scheduler.consumer.matched("r", 0) == 0
    assert scheduler.consumer.plan().drops == ("r",)
    assert scheduler.arrive(params).watches == ()


def test_with_a_full_quarantine_nothing_is_promised(scheduler):
    scheduler.ready()
    scheduler.consumer.receive(Report(is_full=True))
    assert scheduler.consumer.matched("r", 0) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"secret": b"short"}, {"quarantine_bytes_max": 1 << 40}, {"lease_total_s": 1.0}],
)
def test_settings_that_cannot_be_right_name_the_key(wrong):
    with pytest.raises(ConfigError) as refused:
        check_settings(Settings(**({"secret": SECRET} | wrong)))
    assert refused.value.context["key"] == next(iter(wrong))
