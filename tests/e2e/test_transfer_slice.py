"""The thinnest whole: a prompt is computed in one process and answered in another."""

from tests.e2e import transfer
from tests.e2e.prompts import tokens

PROMPT = tokens(300)


def test_computed_there_is_answered_here(engine_a, engine_b, model):
    engine_b.open(model("full"))
    plain = engine_b.generate([PROMPT])
    engine_b.close()
    engine_a.open(model("full"), **transfer.settings("kv_producer"))
    engine_b.open(model("full"), **transfer.settings("kv_consumer"))
    there = transfer.hand_over(engine_a, engine_b, [PROMPT])
    metrics = engine_b.metrics()
    engine_a.close()
    engine_b.close()

    assert there.tokens == plain.tokens
    assert there.logprobs == plain.logprobs
    assert there.external_hit_tokens == len(PROMPT) - 1
    assert metrics["vllm:kvferry_transfer_requests"] == 1
