"""Engines share a store through a catalog on a server, and the server may lose everything."""

import time

import pytest

from kvferry.testing.valkey import ServerProcess
from tests.e2e import prompts
from tests.e2e.engine import PATIENCE_S, Answers, EngineProcess

PROMPT = prompts.tokens(1000)
FULL_CHUNK_TOKENS = 960
PAGE_COUNT = FULL_CHUNK_TOKENS // 64


@pytest.fixture
def server(tmp_path):
    server = ServerProcess(tmp_path / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def shared(store, server):
    store.catalog_url = server.url.name
    return store


@pytest.fixture
def both(engine_a, engine_b, model, shared):
    """Two engines that are open at a time."""
    for engine in (engine_a, engine_b):
        engine.open(model("full"), **shared.settings())
    shared.make_ready(engine_a)
    yield engine_a, engine_b
    for engine in (engine_a, engine_b):
        engine.close()


def test_a_server_that_comes_back_empty_costs_nothing_but_time(both, shared, server):
    engine_a, engine_b = both
    cold = engine_a.generate([PROMPT])
    shared.wait_for_pages(PAGE_COUNT)
    warm = engine_b.generate([PROMPT])

    server.kill()
    down = _fresh(engine_b)
    server.forget()
    server.start()
    healed = [_until_hit(engine) for engine in both]
    losses = [engine.metrics()["vllm:kvferry_catalog_losses"] for engine in both]

    assert cold.external_hit_tokens == 0
    assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
    assert down.external_hit_tokens == 0, "the catalog was not down"
    assert min(losses) >= 1, "nobody noticed"
    assert cold.tokens == warm.tokens == down.tokens == healed[0].tokens == healed[1].tokens
    shared.wait_for_pages(PAGE_COUNT)


def _fresh(engine: EngineProcess) -> Answers:
    """The answer without what the engine itself still has."""
    engine.reset_prefix_cache()
    return engine.generate([PROMPT])


def _until_hit(engine: EngineProcess) -> Answers:
    give_up_s = time.monotonic() + PATIENCE_S
    while (answer := _fresh(engine)).external_hit_tokens != FULL_CHUNK_TOKENS:
        assert time.monotonic() < give_up_s, f"only {answer.external_hit_tokens} tokens are loaded"
        time.sleep(0.2)
    return answer
