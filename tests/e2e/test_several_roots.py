"""One store over two mounts: what lies on either is loaded, and a mount that is missing costs what
lay on it and nothing else."""

import pytest

from tests.e2e import prompts
from tests.e2e.store import Store

PROMPT_TOKENS = 1000
FULL_CHUNK_TOKENS = 960


@pytest.mark.slow
def test_two_roots_are_one_store_and_either_may_be_missing(engine_a, engine_b, model, tmp_path):
    store, further = Store(tmp_path), tmp_path / "further"
    store.further = [further]
    settings = store.settings(segment_bytes="1MiB")
    prompt = prompts.tokens(PROMPT_TOKENS)
    engine_a.open(model("full"), **settings)
    store.make_ready(engine_a)
    cold = engine_a.generate([prompt])
    store.wait_for_pages(FULL_CHUNK_TOKENS // 64)
    engine_a.close()
    assert any(store.pages.glob("segments/*.seg"))
    assert any(further.glob("segments/*.seg"))

    engine_b.open(model("full"), **settings)
    warm = engine_b.generate([prompt])
    engine_b.close()
    assert (cold.external_hit_tokens, warm.external_hit_tokens) == (0, FULL_CHUNK_TOKENS)
    assert cold.tokens == warm.tokens

    further.rename(tmp_path / "elsewhere")
    further.mkdir()
    engine_a.open(model("full"), **settings)
    without = engine_a.generate([prompt])
    engine_a.close()
    assert without.tokens == cold.tokens
    assert list(further.iterdir()) == []

    further.rmdir()
    (tmp_path / "elsewhere").rename(further)
    engine_b.open(model("full"), **settings)
    back = engine_b.generate([prompt])
    engine_b.close()
    assert back.external_hit_tokens == FULL_CHUNK_TOKENS
    assert back.tokens == cold.tokens
