"""Engines of other shapes: windows, few blocks, few heads, other degrees of tensor parallelism,
other blocks."""

import pytest

from tests.e2e import transfer
from tests.e2e.engine import Answers, EngineProcess
from tests.e2e.prompts import tokens
from tests.e2e.transfer import PUSH, assert_same

WINDOWED = [tokens(count, 70 + count) for count in (96, 127, 128, 129, 160, 223, 224, 225, 500)]
PRESSED = [tokens(200 + number, 80 + number) for number in range(5)]
PROMPTS = [tokens(count, 90 + count) for count in (64, 129, 300)]


def plain(engine: EngineProcess, model, prompts) -> list[Answers]:
    """Each alone."""
    engine.open(model)
    answers = [engine.generate([prompt]) for prompt in prompts]
    engine.close()
    return answers


def check(producer, consumer, prompts, alone, tolerance=transfer.TOLERANCE) -> None:
    for prompt, expected in zip(prompts, alone, strict=True):
        answers = transfer.hand_over(producer, consumer, [prompt])
        assert_same(answers, expected, tolerance)
        assert answers.external_hit_tokens == len(prompt) - 1


def test_windows(engine_a, engine_b, model):
    """What has left the window is not there, and what is about to leave it is needed once more."""
    alone = plain(engine_b, model("window"), WINDOWED)
    engine_a.open(model("window"), **transfer.settings("kv_producer"))
    engine_b.open(model("window"), **transfer.settings("kv_consumer"))
    check(engine_a, engine_b, WINDOWED, alone, tolerance=1e-6)
    engine_b.wait_for_rest()
    engine_a.wait_for_rest()
    engine_a.close()
    engine_b.close()


def test_windows_that_are_pushed(engine_a, engine_b, model):
    """Layers without a window while they are computed, the others when the prefill has finished:
    their blocks may be another user's before."""
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    engine_b.open(model("window"), **few)
    alone = [engine_b.generate([prompt]) for prompt in WINDOWED]
    engine_b.close()
    engine_a.open(model("window"), **few, **transfer.settings("kv_producer", **PUSH))
    engine_b.open(model("window"), **few, **transfer.settings("kv_consumer", **PUSH))
    offer = transfer.known(engine_a, tokens(100, 3))
    for prompt, expected in zip(WINDOWED, alone, strict=True):
        answers = transfer.at_once(engine_a, engine_b, offer, prompt)
        assert_same(answers, expected)
        assert answers.external_hit_tokens == len(prompt) - 1
    engine_b.wait_for_rest()
    engine_a.wait_for_rest()
    engine_a.close()
    engine_b.close()


@pytest.mark.slow
def test_little_room_on_either_side(engine_a, engine_b, model):
    """More than fits is answered in turns: what was fetched and lost is computed. A producer that
    keeps much already offers nothing, and answers."""
    engine_b.open(model("full"))
    alone = [engine_b.generate([prompt], max_tokens=100) for prompt in PRESSED]
    engine_b.close()
    engine_a.open(model("full"), **transfer.settings("kv_producer", leased_blocks_max=40))
    engine_b.open(
        model("full"),
        **transfer.settings("kv_consumer"),
        num_gpu_blocks_override=33,
        max_model_len=1024,
    )
    answers = transfer.hand_over(engine_a, engine_b, PRESSED, max_tokens=100)
    engine_b.wait_for_rest()
    engine_a.wait_for_rest()
    nothing = transfer.prefill(engine_a, [tokens(1300, 5)])
    engine_a.close()
    engine_b.close()

    assert answers.preemptions > 0
    assert answers.external_hit_tokens >= sum(len(prompt) - 1 for prompt in PRESSED)
    assert list(answers.tokens) == [one.tokens[0] for one in alone]
    assert nothing == [None]


@pytest.mark.slow
def test_blocks_that_cannot_be_taken_apart_are_refused(engine_a, engine_b, model):
    """The CPU backend packs each block as a whole: such engines say why, and compute."""
    prompt, other = tokens(300, 4), tokens(300, 5)
    alone = plain(engine_b, model("full"), [prompt, other])
    engine_a.open(model("full"), **transfer.settings("kv_both"), block_size=32)
    engine_b.open(model("full"), **transfer.settings("kv_both"), block_size=64)
    answers = [
        transfer.hand_over(engine_a, engine_b, [prompt]),
        transfer.hand_over(engine_b, engine_a, [other]),
    ]
    refused = [
        engine.metrics()["vllm:kvferry_transfer_requests:foreign"]
        for engine in (engine_a, engine_b)
    ]
    engine_a.close()
    engine_b.close()

    assert refused == [1, 1]
    for answer, expected in zip(answers, alone, strict=True):
        assert_same(answer, expected)
        assert answer.external_hit_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, PUSH], ids=["pull", "push"])
@pytest.mark.parametrize("name", ["full", "few heads"])
def test_other_degrees_of_tensor_parallelism(engine_a, log_folder, model, name, how):
    """Both ways; heads are split, or held twice."""
    alone = plain(engine_a, model(name), PROMPTS)
    engine_a.open(model(name), **transfer.settings("kv_both", **how))
    with EngineProcess(log_folder / "two.log") as two_ranks:
        settings = transfer.settings("kv_both", **how)
        two_ranks.open(model(name), **settings, tensor_parallel_size=2)
        check(engine_a, two_ranks, PROMPTS, alone, tolerance=1e-3)
        for engine in (two_ranks, engine_a):  # what is kept for others is not forgotten
            engine.wait_for_rest()
            assert engine.reset_prefix_cache()
        check(two_ranks, engine_a, PROMPTS, alone, tolerance=1e-3)
        two_ranks.wait_for_rest()
        two_ranks.close()
    engine_a.wait_for_rest()
    engine_a.close()


def test_a_producer_that_was_killed(engine_a, engine_b, model):
    """Also one that comes back as another one is no obstacle."""
    prompt = tokens(300, 8)
    (alone,) = plain(engine_b, model("full"), [prompt])
    engine_a.open(model("full"), **transfer.settings("kv_producer"))
    engine_b.open(model("full"), **transfer.settings("kv_consumer"))
    known = transfer.hand_over(engine_a, engine_b, [tokens(100, 9)])
    (carried,) = transfer.prefill(engine_a, [prompt])
    engine_a.kill()
    answers = engine_b.generate([prompt], transfers=[carried])
    refused = engine_b.metrics()["vllm:kvferry_transfer_requests:unreachable"]
    engine_a.start()
    assert_same(answers, alone)
    assert known.external_hit_tokens == 99
    assert (answers.external_hit_tokens, refused) == (0, 1)
    engine_b.wait_for_rest()
    engine_b.close()
