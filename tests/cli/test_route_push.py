"""`kvferry route --push`: both engines are asked at once, by an appointment that only who has the
secret can make."""

import importlib.util
import subprocess

import pytest

from kvferry.transfer import params
from tests.cli.routed import PATIENCE_S, command, running, wait_until
from tests.transfer import http_engine
from tests.transfer.http_engine import OFFER, SECRET, WORDS, Engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed"
)

PROMPT = {"prompt": "How many?", "max_tokens": 9}
TEXT = "".join(WORDS)


@pytest.fixture
def routed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    engines = [Engine() for _ in range(3)]
    with running(engines[:1], engines[1:], "--push", "--secret-file", str(secret)) as made:
        yield made
    for engine in engines:
        engine.close()


def ask(routed, waits_for=None, **more):
    """Consumers answer when the producer has been asked, or when that holds."""
    (producer,) = routed.producers
    count = len(producer.requests) + 1
    holds = waits_for or (lambda: len(producer.requests) >= count)
    for engine in routed.consumers:
        engine.fault = lambda handler, request: wait_until(holds)
    code, answer = routed.post(**PROMPT, **more)
    assert code == 200 and TEXT in answer


def carried(engine):
    return engine.requests[-1][1]["kv_transfer_params"]


def asked_consumer(routed):
    return next(engine for engine in routed.consumers if engine.requests)


def test_the_first_request_teaches_and_the_next_ones_are_appointed(routed):
    (producer,) = routed.producers
    ask(routed)
    assert carried(producer) == {"do_remote_decode": True}
    assert params.read(SECRET, carried(asked_consumer(routed)))[0] == OFFER
    seen = set()
    for _ in range(2):
        for engine in routed.consumers:
            engine.requests.clear()
        ask(routed)
        there, _ = params.read_appointment(SECRET, carried(producer))
        here, _ = params.read_appointment(SECRET, carried(asked_consumer(routed)))
        assert there == here and there.boot == OFFER.boot and there.token_count == 0
        assert params.wants_remote_decode(carried(producer))
        seen.add(there.transfer)
    assert len(seen) == 2
    assert routed.metric("prefills_total", outcome="offered") == 1
    appointed = [routed.metric("prefills_total", outcome=o) for o in ("met", "cancelled")]
    assert sum(appointed) == 2


def test_what_a_client_sends_of_appointments_goes_nowhere(routed):
    _, forged = params.appoint(b"another secret of his", OFFER, b"x" * 16)
    ask(routed)
    ask(routed, kv_transfer_params=forged)
    assert params.read_appointment(SECRET, carried(routed.producers[0]))[0] is not None


def test_a_prefill_that_nobody_needs_any_more_is_cancelled(routed):
    """The consumer has answered without it."""
    (producer,) = routed.producers
    ask(routed)
    producer.fault = http_engine.hangs
    ask(routed)
    assert producer.hung_up.wait(PATIENCE_S)
    wait_until(lambda: routed.metric("prefills_total", outcome="cancelled") == 1)


def test_a_producer_that_failed_is_learned_anew(routed):
    (producer,) = routed.producers
    ask(routed)
    producer.fault = http_engine.fails
    has_failed = {"leg": "prefill", "reason": "error"}
    ask(routed, lambda: routed.metric("retries_total", **has_failed) == 1)
    producer.fault = None
    routed.wait_until_healthy(1, 2)
    ask(routed)
    assert carried(producer) == {"do_remote_decode": True}


def test_without_the_secret_it_does_not_start():
    urls = ["--producer", "http://127.0.0.1:1", "--consumer", "http://127.0.0.1:2"]
    ended = subprocess.run(
        command(*urls, "--push"), capture_output=True, text=True, env={"PATH": ""}, check=False
    )
    assert ended.returncode != 0
    assert "KVFERRY_TRANSFER_SECRET" in ended.stderr
