"""Engines of three hosts share one store and one catalog's server. Hosts are network namespaces,
and the store's folder is a file system that all of them have."""

import shutil
import signal
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from kvferry.testing.valkey import ServerProcess
from tests.catalog.relay import Relay
from tests.e2e import prompts
from tests.e2e.engine import PATIENCE_S, Answers, EngineError, EngineProcess
from tests.e2e.hosts import HOME, Hosts, can_make, inside
from tests.e2e.store import BOOKKEEPING_BYTES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make(), reason="network namespaces need root and iproute2"),
]

NAMES = ("kvf-a", "kvf-b", "kvf-c")
PROMPT = prompts.tokens(1000)
FULL_CHUNK_TOKENS = 960
PAGE_COUNT = FULL_CHUNK_TOKENS // 64
CAPACITY_BYTES = 24 << 20
PAUSE_S = 60.0
LATE_S = 20.0
"""A request that waits for a server that does not answer is there by then: the deadline of a lookup
and the time of computing, on a machine that may be busy."""
HURRIED = {
    "lookup_deadline_s": 2.0,
    "store_deadline_s": 5.0,
    "reservation_lease_s": 10.0,
    "grace_s": 2.0,
    "capacity_bytes": CAPACITY_BYTES,
    "segment_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def hosts():
    hosts = Hosts(*NAMES)
    hosts.make()
    yield hosts
    hosts.remove()


@pytest.fixture(scope="module")
def processes(hosts, log_folder):
    with ExitStack() as stack:
        yield [
            stack.enter_context(EngineProcess(log_folder / f"{name}.log", before=inside(name)))
            for name in NAMES
        ]


@pytest.fixture
def server(hosts, tmp_path):
    server = ServerProcess(tmp_path / "server", host=HOME)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def address(server):
    """What engines know the server by: after a failover it leads to another one."""
    relay = Relay((HOME, server.url.port), host=HOME)
    relay.start()
    yield relay
    relay.stop()


@pytest.fixture
def store(store, address):
    store.catalog_url = f"valkey://:secret@{HOME}:{address.port}"
    return store


@pytest.fixture
def engines(processes, model, store):
    for engine in processes:
        engine.open(model("full"), **store.settings(**HURRIED))
    store.make_ready(processes[0])
    yield processes
    for engine in processes:
        with suppress(EngineError):
            engine.close()


@pytest.fixture
def cold(engines, store) -> Answers:
    """The first engine's answer, and it is stored."""
    answer = engines[0].generate([PROMPT])
    store.wait_for_pages(PAGE_COUNT)
    assert answer.external_hit_tokens == 0
    return answer


def test_what_one_stores_the_others_load_though_one_is_killed(engines, store, cold):
    _, killed, other = engines
    for engine in engines[1:]:
        warm = engine.generate([PROMPT])
        assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
        assert warm.tokens == cold.tokens

    many = [prompts.tokens(1500, seed) for seed in range(2, 8)]
    storing = threading.Thread(target=_ask_until_killed, args=(killed, many))
    storing.start()
    _wait(lambda: store.page_count() > PAGE_COUNT, "nothing was stored")
    killed.kill()
    storing.join()
    killed.start()
    again = other.generate(many)
    assert 0 < again.external_hit_tokens < 6 * 1472, "it was not killed in the middle"
    assert again.tokens == engines[0].generate(many).tokens
    assert store.disk_bytes() <= CAPACITY_BYTES + BOOKKEEPING_BYTES

    for engine in (engines[0], other):
        engine.wait_for_rest()
        engine.close()
    store.wait_for_reserved(0)
    assert store.contents(), "the pages that are left verify"


def test_a_host_that_is_cut_off_computes_and_hits_again(engines, hosts, cold):
    _, engine, other = engines
    hosts.cut(NAMES[1])
    alone, duration_s = _fresh(engine)
    assert alone.external_hit_tokens == 0, "it was not cut off"
    assert duration_s < LATE_S
    assert _fresh(other)[0].external_hit_tokens == FULL_CHUNK_TOKENS, "others were cut off as well"
    hosts.join(NAMES[1])
    assert alone.tokens == cold.tokens == _until_hit(engine).tokens


def test_a_server_that_pauses_for_a_minute(engines, server, cold):
    server.send(signal.SIGSTOP)
    end_s = time.monotonic() + PAUSE_S
    while time.monotonic() < end_s:
        for engine in engines:
            alone, duration_s = _fresh(engine)
            assert (alone.tokens, alone.external_hit_tokens) == (cold.tokens, 0)
            assert duration_s < LATE_S
    server.send(signal.SIGCONT)
    assert {_until_hit(engine).tokens for engine in engines} == {cold.tokens}


def test_a_server_that_is_set_back_to_an_old_file(engines, server, store, cold, tmp_path):
    time.sleep(1.5)  # its file is flushed once a second
    shutil.copytree(server.folder, tmp_path / "old")
    newer = prompts.tokens(1000, 9)
    expected = engines[0].generate([newer])
    store.wait_for_pages(2 * PAGE_COUNT)
    server.kill()
    shutil.rmtree(server.folder)
    shutil.copytree(tmp_path / "old", server.folder)
    server.start()
    for engine in engines:
        assert _until_hit(engine).tokens == cold.tokens
        assert _until_hit(engine, newer).tokens == expected.tokens


def test_a_failover_to_a_replica_that_lost_the_last_writes(engines, server, address, store, cold):
    following = Relay((HOME, server.url.port))
    following.start()
    replica = ServerProcess(server.folder.parent / "replica", host=HOME)
    replica.start()
    try:
        replica.say("CONFIG", "SET", "masterauth", server.url.password)
        replica.say("REPLICAOF", "127.0.0.1", following.port)
        _wait(lambda: server.say("WAIT", 1, 1000) >= 1, "the replica does not follow")
        following.stop()
        newer = prompts.tokens(1000, 9)
        expected = engines[0].generate([newer])
        store.wait_for_pages(2 * PAGE_COUNT)
        server.kill()
        replica.say("REPLICAOF", "NO", "ONE")
        address.lead_to((HOME, replica.url.port))
        for engine in engines:
            assert _until_hit(engine).tokens == cold.tokens
            assert _until_hit(engine, newer).tokens == expected.tokens
        losses = [engine.metrics()["vllm:kvferry_catalog_losses"] for engine in engines]
        assert min(losses) >= 1, "nobody noticed"
    finally:
        following.stop()
        replica.kill()


def _ask_until_killed(engine: EngineProcess, many: list) -> None:
    with suppress(EngineError, OSError):
        engine.generate(many)


def _fresh(engine: EngineProcess, prompt=PROMPT) -> tuple[Answers, float]:
    """The answer without what the engine itself still has, and how long it took."""
    engine.reset_prefix_cache()
    started_s = time.monotonic()
    return engine.generate([prompt]), time.monotonic() - started_s


def _until_hit(engine: EngineProcess, prompt=PROMPT) -> Answers:
    """Whoever computes it stores it, so in the end it is loaded."""
    found = []
    _wait(
        lambda: (
            found.append(_fresh(engine, prompt)[0])
            or found[-1].external_hit_tokens == FULL_CHUNK_TOKENS
        ),
        "it is not loaded",
    )
    assert len({answer.tokens for answer in found}) == 1, "answers differ meanwhile"
    return found[-1]


def _wait(holds, what: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.2)
