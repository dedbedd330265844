"""The thinnest whole: a prompt is computed in one process and answered in another."""

import pytest

from tests.e2e import transfer
from tests.e2e.engine import EngineProcess
from tests.e2e.prompts import tokens

PROMPT = tokens(300)


@pytest.mark.slow
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


@pytest.mark.slow
def test_engines_as_a_server_runs_them(engine_b, log_folder, model):
    """Each engine's core in a process of its own, which steps by itself: what is kept for others
    is let go though nobody asks for anything."""
    engine_b.open(model("full"))
    plain = engine_b.generate([PROMPT])
    engine_b.close()
    with (
        EngineProcess(log_folder / "there.log", multiprocessing=True) as there,
        EngineProcess(log_folder / "here.log", multiprocessing=True) as here,
    ):
        there.open(model("full"), **transfer.settings("kv_producer", leased_blocks_max=10))
        here.open(model("full"), **transfer.settings("kv_consumer"))
        answers = [transfer.hand_over(there, here, [PROMPT])]
        assert here.reset_prefix_cache()
        here.wait_for_rest()
        there.wait_for_rest()
        answers.append(transfer.hand_over(there, here, [PROMPT]))
        there.close()
        here.close()

    for answer in answers:
        assert (answer.tokens, answer.logprobs) == (plain.tokens, plain.logprobs)
        assert answer.external_hit_tokens == len(PROMPT) - 1
