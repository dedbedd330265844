"""What the adapter promises to vLLM: loads that fail are computed, siblings are tolerated, resets
reset, and a configuration that is wrong does not start."""

import pytest

from tests.e2e import installed, prompts
from tests.e2e.engine import EngineError

PROMPT = prompts.tokens(1000)
FULL_CHUNK_TOKENS = 960


@pytest.mark.parametrize(
    ("name", "page_count"), [pytest.param("full", 15, marks=pytest.mark.slow), ("window", 30)]
)
def test_damaged_pages_are_computed_again(engine_a, model, store, name, page_count):
    engine_a.open(model(name), **store.settings())
    store.make_ready(engine_a)
    cold = engine_a.generate([PROMPT])
    store.wait_for_pages(page_count)
    engine_a.close()
    store.flip_bits()

    engine_a.open(model(name), **store.settings())
    warm = engine_a.generate([PROMPT])
    failures = engine_a.metrics().get("vllm:kvferry_load_failures", 0)
    engine_a.close()

    assert warm.external_hit_tokens >= FULL_CHUNK_TOKENS, "the store never offered its pages"
    assert failures >= 1
    if installed.FAILED_LOADS_ARE_NOT_CACHED:
        assert warm.requests[0].cached_tokens < FULL_CHUNK_TOKENS
    assert warm.tokens == cold.tokens


def test_a_sibling_connector_is_tolerated(engine_a, model, store, tmp_path):
    ours = store.settings()["kv_transfer_config"]
    sibling = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "sibling")},
    }
    both = ours | {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [ours, sibling]},
    }
    answers = []
    for _ in range(2):
        engine_a.open(model("full"), kv_transfer_config=both)
        answers.append(engine_a.generate([PROMPT]))
        store.wait_for_pages(15)
        engine_a.close()
    cold, warm = answers

    assert (cold.external_hit_tokens, warm.external_hit_tokens) == (0, FULL_CHUNK_TOKENS)
    assert cold.tokens == warm.tokens


def test_nothing_stored_before_a_reset_is_offered_after_it(engine_a, model, store):
    engine_a.open(model("full"), **store.settings(), enable_prefix_caching=False)
    cold = engine_a.generate([PROMPT])
    store.wait_for_pages(15)
    warm = engine_a.generate([PROMPT])
    assert engine_a.reset_prefix_cache(reset_connector=True)
    after = engine_a.generate([PROMPT])
    engine_a.close()

    assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
    assert after.external_hit_tokens == 0
    assert cold.tokens == warm.tokens == after.tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_connector_extra_config": {"page": "posix:///x"}}, "Did you mean 'pages'"),
    ],
    ids=["policy", "unknown key"],
)
def test_a_wrong_configuration_does_not_start(engine_a, model, store, changes, words):
    wrong = store.settings()["kv_transfer_config"] | changes

    with pytest.raises(EngineError, match=words):
        engine_a.open(model("full"), kv_transfer_config=wrong)
