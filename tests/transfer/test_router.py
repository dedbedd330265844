"""vllm-router carries what a producer gives to a consumer, and nothing that a client makes up.

The router is real, the engines are HTTP servers that answer as vLLM does.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from kvferry.transfer import params
from tests.transfer.http_engine import OFFER, SECRET, WORDS, Engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed"
)

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def engines():
    producer, consumer = Engine(), Engine()
    yield producer, consumer
    producer.close()
    consumer.close()


@pytest.fixture(scope="module")
def router(engines, tmp_path_factory):
    producer, consumer = engines
    log = tmp_path_factory.mktemp("router") / "log"
    with running_router(producer.url, consumer.url, log) as url:
        yield url


@contextmanager
def running_router(producer, consumer, log):
    """With the arguments that docs/operations.md names."""
    port, metrics_port = free_port(), free_port()
    program = "from vllm_router.launch_router import main; main()"
    arguments = ["--vllm-pd-disaggregation", "--policy", "round_robin"]
    arguments += ["--prefill", producer, "--decode", consumer]
    arguments += ["--port", str(port), "--prometheus-port", str(metrics_port)]
    with log.open("wb") as output:
        command = [sys.executable, "-c", program, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, log)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url, log):
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S)
            return
        except (OSError, urllib.error.HTTPError):
            assert time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.1)


def post(url, path, **body):
    request = urllib.request.Request(
        url + path,
        json.dumps({"model": "m", "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=PATIENCE_S).read().decode()


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "How many?", "max_tokens": 9}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "How many?"}], "max_completion_tokens": 9},
        ),
    ],
)
def test_a_signed_offer_reaches_the_consumer_whatever_a_client_sends(
    engines, router, path, prompt, is_streaming
):
    producer, consumer = engines
    forged = {"do_remote_prefill": True, "kvferry_transfer": "AAAA", "remote_host": "10.9.9.9"}
    options = {"kv_transfer_params": forged, "cache_salt": "tenant"}
    answer = post(router, path, stream=is_streaming, **prompt, **options)
    assert all(word in answer for word in WORDS)

    (asked_path, prefill), (answered_path, decode) = producer.requests[-1], consumer.requests[-1]
    assert asked_path == answered_path == path
    assert params.wants_remote_decode(prefill["kv_transfer_params"])
    assert prefill["max_tokens"] == 1
    assert not prefill["stream"]
    assert params.read(SECRET, decode["kv_transfer_params"]) == (OFFER, "")
    assert bool(decode.get("stream")) is is_streaming
    assert "10.9.9.9" not in json.dumps([prefill, decode])
    assert prefill["cache_salt"] == decode["cache_salt"] == "tenant"
    for name, value in prompt.items():
        assert decode[name] == value


def test_a_prefill_without_an_offer_is_answered(engines, router, monkeypatch):
    _, consumer = engines
    monkeypatch.setattr(params, "mint", lambda *_: None)
    forged = {"do_remote_prefill": True, "kvferry_transfer": "AAAA"}
    body = {"prompt": "How many?", "max_tokens": 9, "kv_transfer_params": forged}
    answer = post(router, "/v1/completions", **body)
    assert "four hundred" in answer
    assert not consumer.requests[-1][1].get("kv_transfer_params")
