"""Two engines and one store on an emulated 3FS: what one has stored the other loads."""

from tests.e2e import prompts
from tests.e2e.store import Store

PROMPT_TOKENS = 1000
FULL_CHUNK_TOKENS = 960


def test_another_process_loads_through_rings(engine_a, engine_b, model, emulation):
    store = Store(emulation.mount)
    settings = store.settings(
        pages=f"usrbio://{store.pages}", usrbio_library=str(emulation.path), read_threads=2
    )
    prompt = prompts.tokens(PROMPT_TOKENS)
    engine_a.open(model("full"), **settings)
    store.make_ready(engine_a)
    cold = engine_a.generate([prompt])
    store.wait_for_pages(FULL_CHUNK_TOKENS // 64)
    engine_a.close()

    engine_b.open(model("full"), **settings)
    warm = engine_b.generate([prompt])
    engine_b.close()

    assert cold.external_hit_tokens == 0
    assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
    assert cold.tokens == warm.tokens
    assert emulation.links() == []
