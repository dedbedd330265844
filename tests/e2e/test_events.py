"""A router that listens to an engine's KV events knows what the store has, and when it is gone."""

import subprocess
import sys
import time

import msgspec
import pytest
import zmq

from tests.e2e import prompts
from tests.e2e.engine import PATIENCE_S

PROMPT = prompts.tokens(1000)
CHUNK_TOKENS, BLOCK_TOKENS = 64, 32
FULL_CHUNK_TOKENS = 960
PAGE_COUNT = FULL_CHUNK_TOKENS // CHUNK_TOKENS


class Router:
    """Hears what one engine publishes."""

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.events: list[dict] = []

    def listen(self) -> None:
        while self._socket.poll(50):
            *_, batch = self._socket.recv_multipart()
            self.events += msgspec.msgpack.decode(batch)[1]

    def of(self, kind: str, medium: str) -> list[dict]:
        return [e for e in self.events if e["type"] == kind and e["medium"] == medium]

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def router(tmp_path):
    router = Router(f"ipc://{tmp_path}/events")
    yield router
    router.close()


def test_a_router_knows_what_is_in_the_store(engine_a, model, store, router, tmp_path):
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
    }
    engine_a.open(model("full"), kv_events_config=events, **store.settings())
    store.make_ready(engine_a)
    engine_a.generate([PROMPT])
    store.wait_for_pages(PAGE_COUNT)

    stored = _heard(engine_a, router, "BlockStored")
    own = {h: e for e in router.of("BlockStored", "GPU") for h in e["block_hashes"]}
    tokens, parent = [], None
    for event in stored:
        assert event["parent_block_hash"] == parent
        assert len(event["token_ids"]) == CHUNK_TOKENS
        assert (event["block_size"], event["group_idx"]) == (BLOCK_TOKENS, 0)
        assert all(block in own for block in event["block_hashes"]), "other hashes than vLLM's"
        tokens, parent = tokens + event["token_ids"], event["block_hashes"][-1]
    assert tokens == PROMPT[:FULL_CHUNK_TOKENS]
    assert router.of("BlockRemoved", "STORAGE") == []

    cleared = [sys.executable, "-c", "from kvferry.cli.main import main; main()", "clear"]
    cleared += [f"posix://{store.pages}", "--catalog", store.catalog_url, "--all"]
    subprocess.run(cleared, check=True, capture_output=True)
    removed = _heard(engine_a, router, "BlockRemoved")
    engine_a.close()
    assert _hashes(removed) == _hashes(stored)


def _heard(engine, router: Router, kind: str) -> list[dict]:
    """An engine tells in its steps, so it gets some."""
    give_up_s = time.monotonic() + PATIENCE_S
    while len(found := router.of(kind, "STORAGE")) < PAGE_COUNT:
        assert time.monotonic() < give_up_s, f"only {len(found)} of {kind}"
        engine.generate([[1]], max_tokens=1)
        router.listen()
    return found


def _hashes(events: list[dict]) -> set:
    return {block for event in events for block in event["block_hashes"]}
