"""`kvferry route`: a request is answered as long as any engine can, and a client can't harm.

The router is the real command in its own process, the engines are HTTP servers that fail as told.
"""

import http.client
import importlib.util
import json
import random
import signal
import socket
import subprocess
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.transfer import params
from tests.cli.routed import BODY_BYTES_MAX, PATIENCE_S, command, is_listening, running, wait_until
from tests.transfer import http_engine
from tests.transfer.http_engine import OFFER, SECRET, WORDS, Engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed"
)

PROMPT = {"prompt": "How many?", "max_tokens": 9}
FORGED = {"do_remote_prefill": True, "kvferry_transfer": "AAAA", "remote_host": "10.9.9.9"}
TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
def shared():
    """Two producers and two consumers behind one router, for all tests that leave them well."""
    engines = [Engine() for _ in range(4)]
    with running(engines[:2], engines[2:], "--patience-s", "2") as routed:
        yield routed
    for engine in engines:
        engine.close()


@pytest.fixture
def routed(shared):
    yield shared
    for engine in shared.producers + shared.consumers:
        engine.fault, engine.is_healthy = None, True
        engine.requests.clear()
        engine.headers.clear()
    shared.wait_until_healthy(2, 2)


def fail_once(engines, fault):
    """Whichever of them is asked first fails, once."""
    turn = threading.Lock()

    def fails(handler, request):
        return turn.acquire(blocking=False) and fault(handler, request)

    for engine in engines:
        engine.fault = fails


def asked(engines):
    return [request for engine in engines for _, request in engine.requests]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", PROMPT),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "How?"}], "max_completion_tokens": 9},
        ),
    ],
)
def test_an_offer_reaches_the_consumer_whatever_a_client_sends(routed, path, prompt, is_streaming):
    extra = {"kv_transfer_params": FORGED, "vllm_xargs": {"kv_transfer_params": "x", "a": 1}}
    options = {"cache_salt": "tenant", "min_tokens": 3, "n": 2, "temperature": 1.1}
    code, answer = routed.post(path, stream=is_streaming, **prompt, **options, **extra)
    assert code == 200
    assert all(word in answer for word in WORDS)
    assert answer.endswith("data: [DONE]\n\n") or not is_streaming

    (prefill,), (decode,) = asked(routed.producers), asked(routed.consumers)
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True}
    assert prefill["max_tokens"] == prefill["n"] == 1
    assert prefill.get("max_completion_tokens", 1) == 1
    assert not prefill["stream"] and "min_tokens" not in prefill
    assert params.read(SECRET, decode.pop("kv_transfer_params")) == (OFFER, "")
    sent = {"model": "m", "stream": is_streaming, "vllm_xargs": {"a": 1}, **prompt, **options}
    assert decode == sent


def test_engines_are_taken_in_turn_and_told_who_asks(routed):
    request = urllib.request.Request(
        routed.url + "/v1/completions",
        json.dumps(PROMPT).encode(),
        {"Authorization": "Bearer token", "X-Request-Id": "7", "Cookie": "private"},
    )
    for _ in range(4):
        urllib.request.urlopen(request, timeout=PATIENCE_S).read()
    for engine in routed.producers + routed.consumers:
        assert len(engine.requests) == 2
        headers = engine.headers[0]
        assert (headers["Authorization"], headers["X-Request-Id"]) == ("Bearer token", "7")
        assert headers["Cookie"] is None


FAULTS = {
    http_engine.dies: "broken",
    http_engine.dies_in_the_answer: "broken",
    http_engine.fails: "error",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_producer_that_fails_is_replaced(routed, fault):
    before = routed.metric("retries_total", leg="prefill", reason=FAULTS[fault])
    fail_once(routed.producers, fault)
    assert TEXT in routed.post(**PROMPT)[1]
    assert len(asked(routed.producers)) == 2
    assert asked(routed.consumers)[0]["kv_transfer_params"]
    assert routed.metric("retries_total", leg="prefill", reason=FAULTS[fault]) == before + 1


def test_without_any_producer_the_consumer_computes(routed):
    for engine in routed.producers:
        engine.fault = http_engine.dies
    code, answer = routed.post(kv_transfer_params=FORGED, **PROMPT)
    assert (code, TEXT in answer) == (200, True)
    (decode,) = asked(routed.consumers)
    assert "kv_transfer_params" not in decode


@pytest.mark.parametrize(
    "fault",
    [
        lambda handler, _: handler.reply(b"[1]") or True,
        lambda handler, _: handler.reply(b"{" * 10_000) or True,
        lambda handler, _: handler.reply(b'{"error": "too long"}', code=400) or True,
        http_engine.aborts,
    ],
)
def test_a_prefill_that_offers_nothing_is_answered(routed, fault):
    for engine in routed.producers:
        engine.fault = fault
    assert TEXT in routed.post(**PROMPT)[1]
    assert "kv_transfer_params" not in asked(routed.consumers)[0]


CONSUMER_FAULTS = FAULTS | {http_engine.aborts: "aborted"}
STREAM_FAULTS = CONSUMER_FAULTS | {http_engine.fails_in_its_stream: "error"}


@pytest.mark.parametrize(
    ("fault", "is_streaming"),
    [(fault, False) for fault in CONSUMER_FAULTS] + [(fault, True) for fault in STREAM_FAULTS],
)
def test_a_consumer_that_fails_before_it_said_anything_is_replaced(routed, fault, is_streaming):
    reason = STREAM_FAULTS[fault]
    before = routed.metric("retries_total", leg="decode", reason=reason)
    fail_once(routed.consumers, fault)
    code, answer = routed.post(stream=is_streaming, **PROMPT)
    assert code == 200
    assert all(word in answer for word in WORDS)
    assert "error" not in answer and "abort" not in answer
    first, second = asked(routed.consumers)
    assert first == second
    assert routed.metric("retries_total", leg="decode", reason=reason) == before + 1


@pytest.mark.parametrize(
    "fault",
    [
        http_engine.stops_in_its_stream,
        http_engine.ends_its_stream_early,
        http_engine.aborts_in_its_stream,
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error(routed, fault):
    """Another engine may go on with other words."""
    before = routed.metric("requests_total", outcome="cut")
    fail_once(routed.consumers, fault)
    code, answer = routed.post(stream=True, **PROMPT)
    *events, end = answer.split("\n\n")
    assert (code, end) == (200, "")
    assert events[0] == f'data: "{WORDS[0]}"'
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 502
    assert len(events) == 2
    assert routed.metric("requests_total", outcome="cut") == before + 1
    assert len(asked(routed.consumers)) == 1


def test_what_the_client_did_wrong_is_told_and_not_tried_again(routed):
    for engine in routed.consumers:
        engine.fault = lambda handler, _: handler.reply(b'{"error": "no"}', code=404) or True
    assert routed.post(**PROMPT) == (404, '{"error": "no"}')
    assert len(asked(routed.consumers)) == 1


def test_a_request_that_kills_engines_is_not_given_to_all_for_ever(routed):
    before = routed.metric("requests_total", outcome="failed")
    for engine in routed.consumers:
        engine.fault = http_engine.fails
    code, answer = routed.post(**PROMPT)
    assert (code, json.loads(answer)["error"]["code"]) == (502, 502)
    assert len(asked(routed.consumers)) == 3
    assert routed.metric("requests_total", outcome="failed") == before + 1


def test_without_a_healthy_consumer_it_says_so(routed):
    for engine in routed.consumers:
        engine.is_healthy = False
    routed.wait_until_healthy(2, 0)
    assert routed.get("/health")[0] == 503
    assert routed.post(**PROMPT)[0] == 503
    assert not asked(routed.consumers)
    for engine in routed.consumers:
        engine.is_healthy = True
    routed.wait_until_healthy(2, 2)
    assert routed.get("/health")[0] == 200
    assert routed.get("/v1/models") == (200, '{"data": [{"id": "m"}]}')


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_several_prompts_in_one_request_are_not_handed_over(routed, prompt):
    assert TEXT in routed.post(prompt=prompt)[1]
    assert not asked(routed.producers)
    assert asked(routed.consumers)[0]["prompt"] == prompt


def test_one_prompt_of_token_ids_is(routed):
    assert TEXT in routed.post(prompt=[1, 2, 3])[1]
    assert asked(routed.producers)[0]["prompt"] == [1, 2, 3]


@pytest.mark.parametrize("leg", ["producers", "consumers"])
def test_a_client_that_hangs_up_cancels_what_is_under_way(routed, leg):
    before = routed.metric("requests_total", outcome="abandoned")
    engines = getattr(routed, leg)
    for engine in engines:
        engine.hung_up.clear()
        engine.fault = http_engine.hangs
    connection = http.client.HTTPConnection(routed.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(PROMPT))
    wait_until(lambda: asked(engines))
    connection.close()
    wait_until(lambda: any(engine.hung_up.is_set() for engine in engines))
    wait_until(lambda: routed.metric("requests_total", outcome="abandoned") == before + 1)
    if leg == "producers":
        assert not asked(routed.consumers)


def test_many_requests_at_once_all_have_their_own_answer(routed):
    def fault(handler, request):
        if not params.wants_remote_decode(request.get("kv_transfer_params")):
            handler.reply(json.dumps({"echo": request["prompt"]}).encode())
            return True
        return False

    for engine in routed.consumers:
        engine.fault = fault
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda i: routed.post(prompt=f"p{i}"), range(100)))
    assert answers == [(200, json.dumps({"echo": f"p{i}"})) for i in range(100)]


NOT_JSON = [
    b"",
    b"{",
    b"[]",
    b"7",
    b'"text"',
    b"\xff\xfe{}",
    b"[" * 50_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b'{"a":' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("body", NOT_JSON)
def test_what_is_no_request_is_refused_and_nobody_sees_it(routed, body):
    code, answer = routed.send("/v1/completions", body)
    assert code == 400
    assert json.loads(answer)["error"]["code"] == 400
    assert not asked(routed.producers) + asked(routed.consumers)


def test_a_body_that_is_too_long_is_refused(routed):
    code, _ = routed.send("/v1/completions", b" " * (BODY_BYTES_MAX + 1))
    assert code == 413
    assert not asked(routed.producers) + asked(routed.consumers)


def test_json_as_deep_as_it_gets_is_answered_one_way_or_the_other(routed):
    for depth in (500, *range(900, 1000)):
        nested = b"[" * depth + b"]" * depth
        assert routed.send("/v1/completions", b'{"x": %s}' % nested)[0] in (200, 400)


def test_odd_json_goes_through_as_it_is(routed):
    body = b'{"prompt": "\\ud800 \\u0000", "seed": 99999999999999999999, "x": [1e400, {}, null]}'
    assert routed.send("/v1/completions", body)[0] == 200
    (decode,) = asked(routed.consumers)
    decode.pop("kv_transfer_params")
    assert decode == json.loads(body)


def test_bytes_that_are_not_http_do_no_harm(routed):
    """Random, and requests that are cut, changed or announced wrongly."""
    generator = random.Random(1)
    text = json.dumps(PROMPT).encode()
    real = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s"
    port = int(routed.url.rpartition(":")[2])
    for number in range(150):
        sent = bytearray(real % (generator.choice([len(text), 3, 10**9]), text))
        for _ in range(generator.randrange(4)):
            sent[generator.randrange(len(sent))] = generator.randrange(256)
        if number % 3 == 0:
            sent = generator.randbytes(200)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent[: generator.randrange(1, len(sent) + 1)])
    assert TEXT in routed.post(**PROMPT)[1]
    assert routed.process.poll() is None


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_its_encoding_says_is_refused(routed, encoding):
    connection = http.client.HTTPConnection(routed.url.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"Content-Encoding": encoding}
    connection.request("POST", "/v1/completions", b"no archive", headers)
    assert connection.getresponse().status == 400
    connection.close()


def test_an_engine_that_stands_still_is_given_up():
    """Its connections do not break, so only its health says it."""
    engines = [Engine() for _ in range(3)]
    stuck, other = engines[1:]
    with running(engines[:1], engines[1:], "--health-deadline-s", "0.5") as routed:
        for engine in engines[1:]:
            engine.fault = http_engine.hangs
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(routed.post, **PROMPT)
            wait_until(lambda: asked([stuck, other]))
            if asked([other]):
                stuck, other = other, stuck
            stuck.is_healthy, other.fault = None, None
            assert TEXT in answer.result(PATIENCE_S)[1]
        assert routed.metric("retries_total", leg="decode", reason="lost") == 1
        assert routed.metric("healthy_engines", role="consumer") == 1
    for engine in engines:
        engine.close()


def test_engines_may_come_and_go():
    first, second, consumer = Engine(), Engine(), Engine()
    with running([first, second], [consumer]) as routed:
        first.close()
        for _ in range(3):
            assert TEXT in routed.post(**PROMPT)[1]
        assert len(second.requests) == 3
        again = Engine(first.server_port)
        routed.wait_until_healthy(2, 1)
        routed.post(**PROMPT)
        routed.post(**PROMPT)
        assert again.requests
        port = consumer.server_port
        consumer.close()
        with ThreadPoolExecutor(1) as pool:  # waits until it is there again
            answer = pool.submit(routed.post, **PROMPT)
            wait_until(lambda: routed.metric("healthy_engines", role="consumer") == 0)
            consumer = Engine(port)
            assert TEXT in answer.result(PATIENCE_S)[1]
    for engine in (second, again, consumer):
        engine.close()


def test_sigterm_lets_requests_end_and_takes_no_new_ones():
    producer, consumer = Engine(), Engine()
    may_answer = threading.Event()
    consumer.fault = lambda *_: not may_answer.wait(PATIENCE_S)
    with running([producer], [consumer]) as routed, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(routed.post, **PROMPT)
        wait_until(lambda: consumer.requests)
        routed.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_listening(int(routed.url.rpartition(":")[2])))
        assert routed.process.poll() is None
        may_answer.set()
        assert TEXT in answer.result(PATIENCE_S)[1]
        assert routed.process.wait(PATIENCE_S) == 0
    producer.close()
    consumer.close()


def test_it_listens_on_loopback_unless_told_otherwise(routed):
    """Docker and many hosts have another address; 127.0.0.2 is one everywhere."""
    port = int(routed.url.rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port)) != 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--producer", "10.0.0.1:8100", "--consumer", "http://a"], "route.url"),
        (["--producer", "http://a", "--consumer", "http://a", "--body", "x"], "--body"),
        (["--producer", "http://a"], "--consumer"),
    ],
)
def test_a_wrong_command_line_is_2(arguments, words):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_port_that_is_taken_is_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["--producer", "http://a", "--consumer", "http://a", "--port", port]
        done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "route.bind" in done.stderr
