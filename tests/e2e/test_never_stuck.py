"""Whatever hangs, is down, or is aborted: requests are answered, the same, and nothing leaks."""

import time

import pytest

from tests.e2e import prompts
from tests.e2e.engine import PATIENCE_S, Answers, EngineProcess

PROMPT = prompts.tokens(1000)
OTHER_PROMPT = prompts.tokens(500, seed=2)
FULL_CHUNK_TOKENS = 960
HURRIED = {
    "lookup_deadline_s": 1.0,
    "load_deadline_s": 2.0,
    "store_deadline_s": 2.0,
    "reservation_lease_s": 8.0,
    "grace_s": 0.5,
    "failed_key_ttl_s": 0.5,
}
RECOMPUTING_S = 60.0
"""More than a prompt takes on a machine that is busy with other things."""


@pytest.fixture
def filled(engine_a, model, store) -> Answers:
    """The store has the pages of `PROMPT`; the answer of the engine that stored them."""
    engine_a.open(model("full"), **store.settings())
    store.make_ready(engine_a)
    cold = engine_a.generate([PROMPT])
    store.wait_for_pages(15)
    engine_a.close()
    return cold


def test_reads_that_hang(engine_a, model, store, filled):
    engine_a.open(model("full"), **store.settings(**HURRIED | {"lookup_deadline_s": 10.0}))
    store.make_ready(engine_a, slot_count=1)
    engine_a.hang_pages()
    stuck = engine_a.generate([PROMPT])
    failures = engine_a.metrics()["vllm:kvferry_load_failures:late"]
    engine_a.release_pages()
    healed = _until_hit(engine_a)
    engine_a.generate([OTHER_PROMPT])
    engine_a.wait_for_rest()
    engine_a.close()

    assert stuck.external_hit_tokens == FULL_CHUNK_TOKENS, "the store never offered its pages"
    assert failures == FULL_CHUNK_TOKENS / 64
    assert stuck.duration_s < HURRIED["load_deadline_s"] + RECOMPUTING_S
    assert healed.external_hit_tokens == FULL_CHUNK_TOKENS
    assert stuck.tokens == healed.tokens == filled.tokens


def test_writes_that_hang(engine_a, model, store):
    engine_a.open(model("full"))
    plain = engine_a.generate([PROMPT])
    engine_a.close()

    engine_a.open(model("full"), **store.settings(**HURRIED))
    store.make_ready(engine_a)
    engine_a.hang_pages()
    stuck = engine_a.generate([PROMPT])
    under_way = engine_a.state()["stores"]
    _until_counted(engine_a, "vllm:kvferry_store_drops:late")
    page_count = store.page_count()
    engine_a.release_pages()
    healed = _until_hit(engine_a)
    state = engine_a.wait_for_rest()
    store.wait_for_reserved(state["slots"])
    engine_a.close()

    assert under_way > 0
    assert page_count == 0
    assert stuck.tokens == healed.tokens == plain.tokens


def test_a_catalog_that_hangs(engine_a, model, store, filled):
    engine_a.open(model("full"), **store.settings(**HURRIED))
    store.make_ready(engine_a, slot_count=1)
    engine_a.hang_catalog()
    stuck = engine_a.generate([PROMPT])
    other = engine_a.generate([OTHER_PROMPT])
    is_open = engine_a.metrics()["vllm:kvferry_breaker_open"]
    _until_counted(engine_a, "vllm:kvferry_store_drops:unavailable")
    engine_a.release_catalog()
    healed = _until_hit(engine_a)
    again = engine_a.generate([OTHER_PROMPT])
    engine_a.wait_for_rest()
    engine_a.close()

    assert is_open == 1
    assert stuck.external_hit_tokens == other.external_hit_tokens == 0
    assert stuck.duration_s < HURRIED["lookup_deadline_s"] + RECOMPUTING_S
    assert stuck.tokens == healed.tokens == filled.tokens
    assert other.tokens == again.tokens


@pytest.mark.parametrize("how", ["down", pytest.param("stuck", marks=pytest.mark.slow)])
def test_a_catalog_that_is_not_there_at_start(engine_a, model, store, filled, how):
    engine_a.break_catalog_opening(how)
    engine_a.open(model("full"), **store.settings(**HURRIED))
    without = engine_a.generate([PROMPT])
    attempt_count = engine_a.mend_catalog_opening()
    healed = _until_hit(engine_a)
    engine_a.wait_for_rest()
    engine_a.close()

    assert attempt_count >= 2, "one for each half"
    assert without.external_hit_tokens == 0
    assert without.tokens == healed.tokens == filled.tokens


def test_abort_while_loading(engine_a, model, store, filled):
    engine_a.open(model("full"), **store.settings(**HURRIED | {"lookup_deadline_s": 10.0}))
    store.make_ready(engine_a, slot_count=1)
    engine_a.hang_pages()
    aborted = engine_a.abort(PROMPT, when="loads")
    engine_a.generate([OTHER_PROMPT])
    engine_a.release_pages()
    healed = _until_hit(engine_a)
    state = engine_a.wait_for_rest()
    store.wait_for_reserved(state["slots"])
    engine_a.close()

    assert aborted["loads"] > 0 and aborted["staging"] > 0
    assert healed.tokens == filled.tokens


def test_abort_while_storing(engine_a, model, store):
    engine_a.open(model("full"), **store.settings(**HURRIED))
    store.make_ready(engine_a)
    engine_a.hang_pages()
    aborted = engine_a.abort(PROMPT, when="stores")
    other = engine_a.generate([OTHER_PROMPT])
    engine_a.release_pages()
    healed = _until_hit(engine_a)
    state = engine_a.wait_for_rest()
    store.wait_for_reserved(state["slots"])
    engine_a.close()
    engine_a.open(model("full"))
    plain = engine_a.generate([PROMPT]), engine_a.generate([OTHER_PROMPT])
    engine_a.close()

    assert aborted["stores"] > 0
    assert (healed.tokens, other.tokens) == (plain[0].tokens, plain[1].tokens)


def test_stores_begun_before_a_reset_are_dropped(engine_a, model, store):
    engine_a.open(model("full"), **store.settings())
    store.make_ready(engine_a)
    engine_a.hang_pages()
    before = engine_a.generate([PROMPT])
    under_way = engine_a.state()["stores"]
    assert engine_a.reset_prefix_cache(reset_connector=True)
    after = engine_a.generate([OTHER_PROMPT])
    drops = engine_a.metrics()["vllm:kvferry_store_drops:reset"]
    engine_a.release_pages()
    engine_a.wait_for_rest()
    engine_a.close()
    engine_a.open(model("full"), **store.settings())
    restarted = engine_a.generate([PROMPT]), engine_a.generate([OTHER_PROMPT])
    engine_a.close()

    assert under_way > 0 and drops == under_way
    assert [answer.external_hit_tokens for answer in restarted] == [0, 0]
    assert before.tokens == restarted[0].tokens
    assert after.tokens == restarted[1].tokens


@pytest.mark.slow
def test_a_writer_killed_while_it_stores(log_folder, engine_a, model, store):
    with EngineProcess(log_folder / "killed.log") as writer:
        settings = store.settings(reservation_lease_s=10.0, store_deadline_s=4.0)
        writer.open(model("full"), **settings)
        store.make_ready(writer)
        writer.slow_pages(late_s=2.0)
        cold = writer.generate([PROMPT])
        under_way = writer.state()["stores"]

    engine_a.open(model("full"), **store.settings(grace_s=0.5))
    warm = engine_a.generate([PROMPT])
    _until_hit(engine_a)
    state = engine_a.wait_for_rest()
    store.wait_for_reserved(state["slots"])
    engine_a.close()

    assert under_way > 0
    assert warm.external_hit_tokens < FULL_CHUNK_TOKENS
    assert warm.tokens == cold.tokens


def _until_hit(engine: EngineProcess) -> Answers:
    """The answer that was loaded as a whole, once the store works again."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        engine.reset_prefix_cache()  # vLLM refuses while a load holds blocks
        answer = engine.generate([PROMPT])
        is_whole = answer.requests[0].cached_tokens == FULL_CHUNK_TOKENS
        if is_whole and answer.external_hit_tokens == FULL_CHUNK_TOKENS:
            return answer
        assert time.monotonic() < give_up_s, f"only {answer.external_hit_tokens} tokens are loaded"


def _until_counted(engine: EngineProcess, name: str) -> None:
    """Counters move with the engine's steps."""
    give_up_s = time.monotonic() + PATIENCE_S
    while engine.metrics().get(name, 0) == 0:
        assert time.monotonic() < give_up_s, f"{name} does not move"
        engine.generate([[1]], max_tokens=1)
