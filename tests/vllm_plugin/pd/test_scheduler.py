"""What vLLM's scheduler says reaches the right half, and clients' nonsense neither."""

from types import SimpleNamespace

import msgspec
import pytest
from vllm.v1.request import RequestStatus

from kvferry.errors import ConfigError
from kvferry.metrics import Metrics
from kvferry.testing.clock import ManualClock
from kvferry.transfer.halves import ProducerPlan
from kvferry.transfer.handshake import RankEnd
from kvferry.transfer.params import Offer, appoint, read
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import RankLayout
from kvferry.vllm_plugin.pd.messages import Plans, Ready
from kvferry.vllm_plugin.pd.scheduler import SchedulerRole, Shape
from kvferry.vllm_plugin.request import Adapters

SECRET = b"s" * 16
TOKENS = list(range(100))
WANTED = {"do_remote_decode": True}
TABLES = ([0, 5, 6, 7, 8], [1, 2, 3])


def ready(rank=0, **fields):
    return Ready(rank, {"model": "m", **fields}, b"n" * 32, RankEnd(RankLayout(rank, ()), b""))


def request(params, request_id="r", tokens=TOKENS, **more):
    facts = {
        "request_id": request_id,
        "kv_transfer_params": params,
        "all_token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": len(tokens),
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**(facts | more))


@pytest.fixture
def role():
    """Producer and consumer at once, of two groups; the runner's work is done by hand."""
    clock = ManualClock()
    shape = Shape(1, (32, 64), is_producer=True, is_consumer=True)
    settings = Settings(secret=SECRET, tokens_min=1)
    role = SchedulerRole(settings, clock, Metrics(), shape, Adapters(0.0))
    role._runner.start = lambda: None
    role.open([ready()])
    yield role
    role.close()


def prefill(role, **more):
    done = request(WANTED, "p", **more)
    role.new_request(done)
    return role.finished(done, TABLES)


def test_a_prefill_is_offered_with_the_blocks_that_its_prompt_covers(role):
    offer, _ = read(SECRET, prefill(role))
    assert offer.token_count == 100
    (hold,) = role.build().producer.holds
    assert hold.tables == ((-1, 5, 6, 7), (1, 2))
    assert not role.reset()
    role.ended(["p"], (), ())
    assert role.reset()
    assert role.build().producer == ProducerPlan()


@pytest.mark.parametrize(
    "more",
    [
        {"status": RequestStatus.FINISHED_ABORTED},
        {"num_computed_tokens": 99},
        {"resumable": True},
    ],
)
def test_what_is_not_whole_is_not_offered(role, more):
    assert prefill(role, **more) is None
    assert role.build() == Plans()


def test_a_request_that_never_said_so_is_not_offered(role):
    done = request(None)
    role.new_request(done)
    assert role.finished(done, TABLES) is None


@pytest.mark.parametrize("params", ["x", [1], {"do_remote_prefill": True}, {"kvferry_transfer": 7}])
def test_nonsense_is_an_ordinary_request(role, params):
    some = request(params)
    role.new_request(some)
    assert role.match(some, 0) == 0
    role.allocated(some, None, 0)
    assert role.finished(some, TABLES) is None
    assert role.build() == Plans()


def test_an_offer_is_watched_from_the_moment_that_its_request_is_here(role):
    params = prefill(role)
    some = request(params)
    role.new_request(some)
    assert role.match(some, 0) is None
    role._runner.step()
    (watch,) = role.build().consumer.watches
    assert watch.request_id == "r"


def test_a_salt_makes_another_text(role):
    params = prefill(role)
    some = request(params, cache_salt="salt")
    role.new_request(some)
    role._runner.step()
    assert role.build().consumer.watches == ()
    assert role.match(some, 0) == 0


def test_who_may_not_read_a_cache_reads_no_others(role):
    """It wants the log-probabilities of its whole prompt."""
    some = request(prefill(role), skip_reading_prefix_cache=True)
    role.new_request(some)
    assert role.match(some, 0) == 0


def test_after_new_weights_an_old_offer_is_for_nobody(role):
    params = prefill(role)
    role.reset()
    some = request(params)
    role.new_request(some)
    assert role.match(some, 0) == 0
    assert role.build().consumer.voids


def test_a_reset_that_has_to_wait_is_one_reset(role):
    """Or nobody would meet again under the name that the weights have now."""
    role._weights_name = "new"
    prefill(role)
    assert not role.reset()
    namespace = role._namespace
    role.ended(["p"], (), ())
    assert role.reset()
    assert role._namespace == namespace
    assert role.reset()
    assert role._namespace != namespace


def test_ranks_that_are_of_two_engines_are_refused():
    with pytest.raises(ConfigError, match="order"):
        made = SchedulerRole(
            Settings(secret=SECRET),
            ManualClock(),
            Metrics(),
            Shape(2, (32,), is_producer=False, is_consumer=True),
            Adapters(0.0),
        )
        made.open([ready(0, order="a"), ready(1, order="b")])
    with pytest.raises(ConfigError, match="2 ranks"):
        made.open([ready(1)])


OFFER = Offer(b"", b"", "host", 1, b"n" * 32, b"", 0)


@pytest.fixture
def pushing():
    """A producer of two groups, the second of which has a window."""
    shape = Shape(1, (32, 64), True, False, shrinking_groups=frozenset({1}))
    settings = Settings(secret=SECRET, direction="push")
    role = SchedulerRole(settings, ManualClock(), Metrics(), shape, Adapters(0.0))
    role._runner.start = lambda: None
    role.open([ready()])
    yield role
    role.close()


def appointed(role, request_id="p"):
    offer = msgspec.structs.replace(OFFER, boot=role._producer._identity.boot)
    params, _ = appoint(SECRET, offer, request_id.encode() * 16)
    arrived = request(params, request_id, status=RequestStatus.RUNNING)
    role.new_request(arrived)
    return arrived


def scheduled(role, computed, tokens, preempted=(), request_id="p"):
    """One step; what ranks get to hear of it."""
    state = SimpleNamespace(get_block_ids=lambda request_id: TABLES)
    role.scheduled(
        SimpleNamespace(
            preempted_req_ids=preempted,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request_id] if tokens else [],
                num_computed_tokens=[computed] if tokens else [],
                new_block_ids=[None] if tokens else [],
                resumed_req_ids=(),
            ),
            num_scheduled_tokens={request_id: tokens},
            kv_connector_block_state=state,
        )
    )
    return role.build().producer


def test_what_is_computed_of_an_appointment_is_told_step_by_step(pushing):
    """Of a group that gives blocks up it is told at the end: they may be others' before."""
    arrived = appointed(pushing)
    plan = scheduled(pushing, 0, 40)
    assert [begin.token_count for begin in plan.begins] == [100]
    assert [(p.computed_tokens, p.tables) for p in plan.progress] == [(40, ((-1, 5, 6, 7), ()))]
    assert [p.computed_tokens for p in scheduled(pushing, 40, 60).progress] == [100]
    assert scheduled(pushing, 100, 1) == ProducerPlan()
    arrived.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert pushing.finished(arrived, TABLES)
    (hold,) = pushing.build().producer.holds
    assert hold.transfer == b"p" * 16 and hold.tables == ((-1, 5, 6, 7), (1, 2))


def test_blocks_are_withdrawn_in_the_step_that_may_overwrite_them(pushing):
    appointed(pushing)
    scheduled(pushing, 0, 40)
    assert scheduled(pushing, 0, 0, preempted=["p", "other"]).withdrawn == ("p",)
    assert [p.computed_tokens for p in scheduled(pushing, 0, 30).progress] == [30]


def test_an_aborted_prefill_is_cancelled(pushing):
    arrived = appointed(pushing)
    scheduled(pushing, 0, 40)
    arrived.status = RequestStatus.FINISHED_ABORTED
    assert pushing.finished(arrived, TABLES) is None
    assert pushing.build().producer.cancelled == ("p",)


def test_an_appointment_is_kept_once(pushing):
    """Two requests with one id would write to one place."""
    appointed(pushing)
    scheduled(pushing, 0, 40)
    other = appointed(pushing)
    other.request_id = "q"
    pushing.new_request(other)
    assert scheduled(pushing, 0, 40, request_id="q") == ProducerPlan()
