"""The thinnest slice: one prompt, two processes, one store."""

import pytest

from tests.e2e import prompts

PROMPT_TOKENS = 1000
FULL_CHUNK_TOKENS = 960


@pytest.mark.parametrize(("name", "group_count"), [("full", 1), ("window", 2)])
def test_another_process_answers_from_what_the_first_one_stored(
    engine_a, engine_b, model, store, name, group_count
):
    prompt = prompts.tokens(PROMPT_TOKENS)
    engine_a.open(model(name))
    plain = engine_a.generate([prompt])
    engine_a.close()

    engine_a.open(model(name), **store.settings())
    store.make_ready(engine_a)
    cold = engine_a.generate([prompt])
    store.wait_for_pages(group_count * FULL_CHUNK_TOKENS // 64)
    engine_a.close()

    engine_b.open(model(name), **store.settings())
    warm = engine_b.generate([prompt])
    engine_b.close()

    assert cold.external_hit_tokens == 0
    assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
    assert warm.local_hit_tokens == 0
    assert plain.tokens == cold.tokens == warm.tokens
