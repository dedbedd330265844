"""Who shares with whom: an engine that was killed, engines of other degrees, other block sizes."""

import time

import pytest

from tests.e2e import prompts
from tests.e2e.engine import Answers, EngineProcess

PROMPT = prompts.tokens(1000)
OTHER_PROMPT = prompts.tokens(1000, seed=2)
FULL_CHUNK_TOKENS = 960
ANSWER_TOKENS = 89  # the last step completes a chunk
TOLERANCE = 1e-4
"""Of log-probabilities; a wrong page moves them by more than 0.1."""


@pytest.mark.parametrize(
    "multiprocessing",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["in-process", "multi-process"],
)
def test_what_an_engine_stores_when_idle_outlives_its_kill(
    log_folder, engine_b, model, store, multiprocessing
):
    with EngineProcess(log_folder / "killed.log", multiprocessing=multiprocessing) as engine_a:
        engine_a.open(model("full"), **store.settings())
        store.make_ready(engine_a)
        engine_a.slow_pages(late_s=0.8)
        cold = engine_a.generate([PROMPT], max_tokens=ANSWER_TOKENS)
        idle = engine_a.state()
        time.sleep(2)
    longer = [*PROMPT, *cold.requests[0].tokens, 1, 2]

    engine_b.open(model("full"), **store.settings())
    warm = engine_b.generate([longer])
    engine_b.close()
    engine_b.open(model("full"))
    plain = engine_b.generate([PROMPT], max_tokens=ANSWER_TOKENS)
    plain_longer = engine_b.generate([longer])
    engine_b.close()

    assert idle["stores"] > 0, "nothing was left to do when the engine went idle"
    assert warm.external_hit_tokens == len(PROMPT) + ANSWER_TOKENS - 1
    assert cold.tokens == plain.tokens
    assert warm.tokens == plain_longer.tokens


def test_the_degree_of_tensor_parallelism_does_not_matter(log_folder, engine_a, model, store):
    engine_a.open(model("full"))
    plain = engine_a.generate([PROMPT]), engine_a.generate([OTHER_PROMPT])
    engine_a.close()
    engine_a.open(model("full"), **store.settings())
    store.make_ready(engine_a)
    engine_a.generate([PROMPT])
    store.wait_for_pages(15)
    engine_a.close()

    with EngineProcess(log_folder / "two.log") as two_ranks:
        two_ranks.open(model("full"), **store.settings(), tensor_parallel_size=2)
        store.make_ready(two_ranks)
        from_one = two_ranks.generate([PROMPT])
        cold_on_two = two_ranks.generate([OTHER_PROMPT])
        store.wait_for_pages(30)
        two_ranks.close()

    engine_a.open(model("full"), **store.settings())
    from_two = engine_a.generate([OTHER_PROMPT])
    engine_a.close()

    assert from_one.external_hit_tokens == from_two.external_hit_tokens == FULL_CHUNK_TOKENS
    assert cold_on_two.external_hit_tokens == 0
    tolerance = max(TOLERANCE, 2 * _gap(cold_on_two, plain[1]))
    assert _gap(from_one, plain[0]) < tolerance
    assert _gap(from_two, plain[1]) < tolerance


def test_blocks_of_different_sizes_do_not_share(engine_a, model, store):
    answers = []
    for block_tokens, page_count in ((32, 15), (64, 30), (64, 30), (32, 30)):
        engine_a.open(model("full"), **store.settings(), block_size=block_tokens)
        store.make_ready(engine_a)
        answers.append(engine_a.generate([PROMPT]))
        store.wait_for_pages(page_count)
        engine_a.close()

    hits = [answer.external_hit_tokens for answer in answers]
    assert hits == [0, 0, FULL_CHUNK_TOKENS, FULL_CHUNK_TOKENS]
    assert len({answer.tokens for answer in answers}) == 1


def _gap(some: Answers, others: Answers) -> float:
    """The greatest difference of log-probabilities; infinite where tokens differ."""
    if some.tokens != others.tokens:
        return float("inf")
    pairs = zip(some.logprobs[0], others.logprobs[0], strict=True)
    return max(abs(a - b) for a, b in pairs)
