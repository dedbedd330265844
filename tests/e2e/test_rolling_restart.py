"""Producers and consumers are restarted one after the other, while clients go on asking.

Real servers of vLLM behind `kvferry route`. One of each role stands all the time, another one is
killed, or ended with SIGTERM, and started again: `--restarts 20` does it so many times.
"""

import json
import time

import pytest

from tests.cli.routed import running
from tests.e2e import load, transfer
from tests.e2e.load import Load
from tests.e2e.prompts import tokens
from tests.e2e.servers import Nursery, Server, post

CLIENTS = 20
BLOCKS = "600"
LEASE_S = 8.0
DOWN_S = 0.5
HEALTH_S = "15"
"""Twenty clients and a start on two cores: a server may be slow without being stuck."""
CUT_AFTER_S = 10.0
"""When a stream may still end with an error after its engine's end."""
REST_S = 60.0
FDS_SPARE = 24
THREADS_SPARE = 8
RSS_SPARE_BYTES = 96 << 20
LENGTHS = (2, 31, 33, 64, 65, 96, 120, 150, 200, 257, 300, 400)
AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:kvferry_transfer_leases_held",
    "vllm:kvferry_transfer_blocks_leased",
    "vllm:kvferry_transfer_requests_waiting",
    "vllm:kvferry_transfer_quarantine_bytes",
)


@pytest.fixture
def nursery(tmp_path):
    with Nursery(tmp_path) as opened:
        yield opened


def answers_of_one_engine(nursery, folder):
    """What is right, by prompt."""
    prompts = [tokens(count, 7000 + i) for i, count in enumerate(LENGTHS * 2)]
    plain = nursery.server("plain", folder, "--num-gpu-blocks-override", BLOCKS)
    plain.start()
    plain.wait_until_healthy()
    right = {
        tuple(prompt): load.tokens_of(post(plain.url, load.body(str(folder), prompt)), False)
        for prompt in prompts
    }
    plain.kill()
    return right


def servers_of(nursery, folder, role, count):
    config = transfer.settings(role, lease_s=LEASE_S)["kv_transfer_config"]
    arguments = ("--num-gpu-blocks-override", BLOCKS, "--kv-transfer-config", json.dumps(config))
    return [nursery.server(f"{role}-{i}", folder, *arguments) for i in range(count)]


def wait_for_rest(server, folder):
    """Nothing is under way or kept; returns what it weighs then."""
    give_up_s = time.monotonic() + REST_S
    while True:
        post(
            server.url, load.body(str(folder), tokens(40, 1), max_tokens=2)
        )  # gauges move in steps
        metrics = server.metrics()
        left = {name: metrics[name] for name in AT_REST if metrics.get(name)}
        if not left:
            return server.weight()
        assert time.monotonic() < give_up_s, f"{server.name}: {left}"
        time.sleep(0.5)


def restart(server: Server, *, is_killed: bool) -> float:
    """Returns when its end began."""
    ended_s = time.monotonic()
    (server.kill if is_killed else server.terminate)()
    time.sleep(DOWN_S)
    server.start()
    server.wait_until_healthy()
    return ended_s


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_restarts_under_load(nursery, model, request, record_property):
    folder, restart_count = model("full"), request.config.getoption("--restarts")
    right = answers_of_one_engine(nursery, folder)
    producers = servers_of(nursery, folder, "kv_producer", 2)
    consumers = servers_of(nursery, folder, "kv_consumer", 2)
    for server in producers + consumers:
        server.start()
    for server in producers + consumers:
        server.wait_until_healthy()
    standing = [producers[0], consumers[0]]
    for server in standing:
        server.give_way()

    with running(producers, consumers, "--health-deadline-s", HEALTH_S) as routed:
        with Load(routed.url, str(folder), right, CLIENTS) as warm_up:
            time.sleep(10.0)
        assert warm_up.seen.wrong == [] and warm_up.seen.cut_s == []
        before = {server.name: wait_for_rest(server, folder) for server in standing}

        consumer_ends_s = []
        with Load(routed.url, str(folder), right, CLIENTS) as clients:
            for number in range(restart_count):
                is_consumer, is_killed = number % 2 == 1, number // 2 % 2 == 0
                ended_s = restart((consumers if is_consumer else producers)[1], is_killed=is_killed)
                if is_consumer:
                    consumer_ends_s.append(ended_s)
                routed.wait_until_healthy(2, 2)
        after = {server.name: wait_for_rest(server, folder) for server in standing}
        retries = {
            (leg, reason): count
            for leg in ("prefill", "decode")
            for reason in ("refused", "broken", "error", "aborted", "lost")
            if (count := routed.metric("retries_total", leg=leg, reason=reason))
        }
        failed = routed.metric("requests_total", outcome="failed")
        offered = routed.metric("prefills_total", outcome="offered")
    counted = standing[1].metrics()
    seen = clients.seen
    record_property("seen", seen)
    print(seen, retries, offered, before, after)
    print({name: count for name, count in counted.items() if ":" in name.removeprefix("vllm:")})

    assert seen.wrong == []
    assert failed == 0
    for cut_s in seen.cut_s:
        assert any(0 <= cut_s - ended_s <= CUT_AFTER_S for ended_s in consumer_ends_s)
    assert seen.answered > CLIENTS * restart_count
    assert any(leg == "prefill" for leg, _ in retries)
    assert any(leg == "decode" for leg, _ in retries)
    assert offered > seen.answered / 2
    loaded = counted["vllm:kvferry_transfer_requests_total:loaded"]
    assert loaded > 0.5 * counted["vllm:kvferry_transfer_requests_total"]
    assert counted["vllm:external_prefix_cache_hits_total"] > 10 * loaded
    for name, weight in before.items():
        assert after[name].fds <= weight.fds + FDS_SPARE
        assert after[name].threads <= weight.threads + THREADS_SPARE
        assert after[name].rss_bytes <= weight.rss_bytes + RSS_SPARE_BYTES
