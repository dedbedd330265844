"""Engines that are producer and consumer at once, small steps, no cache; and what one of them does
to the other when it stands still in the middle of a read or comes back as another one."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e import transfer
from tests.e2e.engine import PATIENCE_S
from tests.e2e.prompts import tokens
from tests.e2e.transfer import assert_same

LENGTHS = (5, 33, 200, 300)
THERE, HERE = ([tokens(count, seed + count) for count in LENGTHS] for seed in (5000, 6000))
SMALL_STEPS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "max_num_seqs": 4}


@pytest.mark.slow
def test_both_ways_at_the_same_time(engine_a, engine_b, model):
    """A prompt takes several steps in one engine; the other one has no cache of its own."""
    engine_a.open(model("full"), **transfer.settings("kv_both"), **SMALL_STEPS)
    engine_b.open(model("full"), **transfer.settings("kv_both"), enable_prefix_caching=False)
    engines = engine_a, engine_b
    with ThreadPoolExecutor(2) as both:
        carried = list(both.map(transfer.prefill, engines, (THERE, HERE)))
        answers = list(
            both.map(
                lambda engine, prompts, records: engine.generate(prompts, transfers=records),
                engines,
                (HERE, THERE),
                reversed(carried),
            )
        )
        siblings = list(
            both.map(
                lambda engine, prompt, record: engine.generate(
                    [prompt], transfers=[record], n=4, max_tokens=1, temperature=1.0, top_k=1
                ),
                engines,
                (prompt_a := tokens(150, 701), prompt_b := tokens(150, 702)),
                (
                    transfer.prefill(engine_b, [prompt_a])[0],
                    transfer.prefill(engine_a, [prompt_b])[0],
                ),
            )
        )
    alone = [engine_b.generate([prompt]) for prompt in (*HERE, *THERE)]
    for engine in engines:
        engine.wait_for_rest()
        engine.close()

    for number, answer in enumerate((*answers[0].requests, *answers[1].requests)):
        assert answer.tokens == alone[number].tokens[0]
    for answer in answers:
        assert answer.external_hit_tokens == sum(count - 1 for count in LENGTHS)
    for sibling in siblings:
        assert len({sibling.requests[0].tokens, *sibling.requests[0].siblings}) == 1
        assert sibling.external_hit_tokens >= 149


@pytest.mark.slow
def test_a_producer_that_stands_still_while_it_is_read(engine_a, engine_b, model):
    """The request is answered; what lands when the producer goes on lands in nobody's staging. And
    when another one is at its address, its offers are worth nothing any more."""
    prompts = [tokens(300, seed) for seed in (801, 802, 803)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    producer = transfer.settings("kv_producer", bind_port=port, lease_s=60.0)
    engine_a.open(model("full"), **producer)
    engine_b.inject("stop_at_next_read", group=engine_a.group)
    try:
        engine_b.open(model("full"), **transfer.settings("kv_consumer", read_deadline_s=1.0))
        stopped = engine_b.generate(prompts[:1], transfers=transfer.prefill(engine_a, prompts[:1]))
        state = engine_b.state()
    finally:
        engine_b.restore()
        engine_a.go_on()
    engine_b.wait_for_rest()
    again = transfer.hand_over(engine_a, engine_b, prompts[1:2])
    stale = transfer.prefill(engine_a, prompts[2:])
    engine_a.close()
    engine_a.open(model("full"), **producer)
    after = engine_b.generate(prompts[2:], transfers=stale)
    new = transfer.hand_over(engine_a, engine_b, [tokens(200, 804)])
    engine_b.wait_for_rest()
    engine_a.wait_for_rest()
    assert engine_b.reset_prefix_cache()
    alone = [engine_b.generate([prompt]) for prompt in prompts]
    engine_a.close()
    engine_b.close()

    assert state["reads"] == state["staging"] > 0, "the transport read without the producer"
    for answers, expected in zip((stopped, again, after), alone, strict=True):
        assert_same(answers, expected)
    assert (again.external_hit_tokens, after.external_hit_tokens) == (299, 0)
    assert new.external_hit_tokens == 199


@pytest.mark.slow
def test_a_transport_that_fails_altogether(engine_a, engine_b, model):
    """The engine serves on without it, and offers nothing that it would not keep."""
    prompts = [tokens(200, seed) for seed in (901, 902, 903)]
    engine_a.open(model("full"), **transfer.settings("kv_producer", lease_s=3.0))
    engine_b.open(model("full"), **transfer.settings("kv_consumer"))
    transfer.hand_over(engine_a, engine_b, [tokens(100, 904)])
    carried = transfer.prefill(engine_a, prompts[:1])
    engine_b.inject("break_link")
    engine_a.inject("break_link")
    try:
        answers = [engine_b.generate(prompts[:1], transfers=carried)]
        transfer.prefill(engine_a, prompts[1:2])
        nothing = transfer.prefill(engine_a, prompts[2:])
        answers += [engine_a.generate([prompt]) for prompt in prompts[1:]]
        wait_until_free(engine_a)
        wait_until_free(engine_b)
    finally:
        engine_a.restore()
        engine_b.restore()
    assert engine_b.reset_prefix_cache()
    alone = [engine_b.generate([prompt]) for prompt in prompts]
    engine_a.close()
    engine_b.close()

    assert nothing == [None]
    for answer, expected in zip(answers, alone, strict=True):
        assert_same(answer, expected)


def wait_until_free(engine):
    """vLLM has all of its blocks again; what a connector that stands aside counts is stale."""
    give_up_s = time.monotonic() + PATIENCE_S
    while (state := engine.state())["blocks_in_use"] or state["requests"]:
        assert time.monotonic() < give_up_s, f"never free: {state}"
        time.sleep(0.05)
