"""Both connectors in one engine: what no producer can give any more is loaded from the store."""

from typing import Any

import pytest

from tests.e2e import transfer
from tests.e2e.prompts import tokens

FIRST, SECOND = tokens(300, 21), tokens(300, 22)
STORED_TOKENS = 256


def both(store, role: str) -> dict[str, Any]:
    parts = [transfer.settings(role)["kv_transfer_config"], store.settings()["kv_transfer_config"]]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": parts},
        }
    }


@pytest.mark.slow
def test_a_dead_producers_prompt_comes_from_the_store(engine_a, engine_b, model, store):
    engine_b.open(model("full"))
    plain = [engine_b.generate([prompt]) for prompt in (FIRST, SECOND)]
    engine_b.close()
    engine_a.open(model("full"), **both(store, "kv_producer"))
    store.make_ready(engine_a)
    first, second = transfer.prefill(engine_a, [FIRST, SECOND])
    store.wait_for_pages(2 * STORED_TOKENS // 64)
    engine_b.open(model("full"), **both(store, "kv_consumer"))
    handed_over = engine_b.generate([FIRST], transfers=[first])
    engine_a.kill()
    from_store = engine_b.generate([SECOND], transfers=[second])
    engine_b.close()
    engine_a.start()

    assert handed_over.external_hit_tokens == len(FIRST) - 1
    assert from_store.external_hit_tokens == STORED_TOKENS
    transfer.assert_same(handed_over, plain[0])
    transfer.assert_same(from_store, plain[1])
