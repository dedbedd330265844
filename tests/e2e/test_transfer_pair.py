"""One producer and one consumer answer many prompts: as a single engine does, whatever comes."""

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e import transfer
from tests.e2e.engine import PATIENCE_S, Answers, EngineProcess
from tests.e2e.prompts import tokens
from tests.e2e.transfer import assert_same

LENGTHS = (2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 300, 700)
FIELD = "kvferry_transfer"
BATCH = tuple(tokens(count, 50 + count) for count in (40, 128, 200, 333))


@dataclass(frozen=True)
class Pair:
    """`plain`: a single engine's answers, by prompt."""

    producer: EngineProcess
    consumer: EngineProcess
    plain: dict[tuple[int, ...], Answers]

    def prefill(self, *prompts: list[int]) -> list:
        return transfer.prefill(self.producer, prompts)

    def answer(self, prompt: list[int], carried, external: int, local: int = 0) -> None:
        """It is right, and its tokens came from where they should."""
        answers = self.consumer.generate([prompt], transfers=[carried])
        assert_same(answers, self.plain[tuple(prompt)])
        assert (answers.external_hit_tokens, answers.local_hit_tokens) == (external, local)

    def outcomes(self, outcome: str) -> float:
        return self.consumer.metrics().get(f"vllm:kvferry_transfer_requests:{outcome}", 0)

    def rest(self) -> None:
        """Nothing is left of anything, on either side."""
        self.consumer.wait_for_rest()
        self.producer.wait_for_rest()


def prompt_of(name: str, count: int) -> list[int]:
    """Of this test only, so that nothing of it is cached."""
    return tokens(count, seed=sum(name.encode()) * 1000 + count)


PROMPTS = [
    *(prompt_of("lengths", count) for count in LENGTHS),
    *BATCH,
    *(prompt_of(name, 200) for name in ("warm", "siblings", "forged", "twice", "other", "abort")),
]


@pytest.fixture(scope="module")
def pair(engine_a, engine_b, model) -> Iterator[Pair]:
    engine_b.open(model("full"))
    plain = {tuple(prompt): engine_b.generate([prompt]) for prompt in PROMPTS}
    engine_b.close()
    engine_a.open(model("full"), **transfer.settings("kv_producer"))
    engine_b.open(model("full"), **transfer.settings("kv_consumer", claim_deadline_s=5.0))
    yield Pair(engine_a, engine_b, plain)
    engine_a.close()
    engine_b.close()


@pytest.mark.parametrize("count", LENGTHS)
def test_lengths_around_the_block(pair, count):
    prompt = prompt_of("lengths", count)
    (carried,) = pair.prefill(prompt)
    pair.answer(prompt, carried, external=count - 1)


def test_what_is_here_already_is_not_fetched(pair):
    """And the producer, warm as well, is told: nothing stays kept."""
    prompt = prompt_of("warm", 200)
    pair.answer(prompt, pair.prefill(prompt)[0], external=199)
    pair.answer(prompt, pair.prefill(prompt)[0], external=7, local=192)
    longer = [*prompt, *tokens(50, 7)]
    cold = pair.consumer.generate([longer], transfers=pair.prefill(longer))
    assert (cold.external_hit_tokens, cold.local_hit_tokens) == (57, 192)
    pair.rest()


def test_a_batch(pair):
    carried = pair.prefill(*BATCH)
    answers = pair.consumer.generate(BATCH, transfers=carried)
    for number, prompt in enumerate(BATCH):
        assert answers.tokens[number] == pair.plain[tuple(prompt)].tokens[0]
    assert answers.external_hit_tokens == sum(len(prompt) - 1 for prompt in BATCH)
    pair.rest()


def test_four_answers_to_one_prompt(pair):
    prompt = prompt_of("siblings", 200)
    answers = pair.consumer.generate(
        [prompt], transfers=pair.prefill(prompt), n=4, temperature=1.0, seed=1, top_k=1
    )
    (answer,) = answers.requests
    assert {answer.tokens, *answer.siblings} == set(pair.plain[tuple(prompt)].tokens)
    assert len(answer.siblings) == 3
    assert answers.external_hit_tokens > 0
    pair.rest()


def test_what_a_client_makes_up_is_computed_here_and_counted(pair):
    prompt = prompt_of("forged", 200)
    (real,) = pair.prefill(prompt)
    frame = bytearray(base64.urlsafe_b64decode(real[FIELD]))
    frame[-1] ^= 1
    inventions = {
        "unsigned": {"do_remote_prefill": True},
        "forged": real | {FIELD: base64.urlsafe_b64encode(frame).decode()},
        "malformed": real | {FIELD: [1, 2]},
    }
    local = 0
    for outcome, carried in inventions.items():
        before = pair.outcomes(outcome)
        pair.answer(prompt, carried, external=0, local=local)
        assert pair.outcomes(outcome) == before + 1
        local = 192
    pair.answer(prompt, real, external=7, local=192)


def test_an_offer_serves_its_own_prompt_only(pair):
    """Somebody else's parameters do not bring his answer."""
    (carried,) = pair.prefill(prompt_of("twice", 200))
    other = prompt_of("other", 200)
    pair.answer(other, carried, external=0)
    assert pair.outcomes("other_text") == 1
    salted = pair.consumer.generate([other], transfers=[carried], salts=["salt"])
    assert salted.tokens == pair.plain[tuple(other)].tokens
    assert salted.external_hit_tokens == 0
    pair.answer(prompt_of("twice", 200), carried, external=199)


def test_the_same_parameters_again_find_nothing_to_read(pair):
    prompt = prompt_of("twice", 200)
    (carried,) = pair.prefill(prompt)
    pair.consumer.generate([prompt], transfers=[carried])
    pair.rest()
    assert pair.consumer.reset_prefix_cache()
    before = pair.outcomes("over")
    pair.answer(prompt, carried, external=0)
    assert pair.outcomes("over") == before + 1


def test_an_abort_while_the_producer_is_asked(pair):
    prompt = prompt_of("abort", 200)
    (carried,) = pair.prefill(prompt)
    assert pair.consumer.abort(prompt, "claims", transfer=carried)["claims"] == 1
    pair.rest()
    pair.answer(prompt, pair.prefill(prompt)[0], external=199)


def test_an_abort_while_reading(pair):
    """The read goes on in quarantine; blocks are free at once."""
    prompt = prompt_of("abort", 200)
    assert pair.consumer.reset_prefix_cache()
    (carried,) = pair.prefill(prompt)
    pair.consumer.inject("hold_reads")
    try:
        assert pair.consumer.abort(prompt, "reads", transfer=carried)["reads"] >= 1
        give_up_s = time.monotonic() + PATIENCE_S
        while (state := pair.consumer.state())["requests"] and time.monotonic() < give_up_s:
            time.sleep(0.05)  # the engine steps between calls
        assert (state["requests"], state["blocks_in_use"]) == (0, 0)
        assert state["reads"] >= 1
    finally:
        pair.consumer.restore()
    pair.rest()
    pair.answer(prompt, pair.prefill(prompt)[0], external=199)


def test_a_producer_that_stands_still_is_done_without(pair):
    prompt = prompt_of("abort", 200)
    assert pair.consumer.reset_prefix_cache()
    (carried,) = pair.prefill(prompt)
    pair.producer.stop()
    try:
        pair.answer(prompt, carried, external=0)
    finally:
        pair.producer.go_on()
    assert pair.outcomes("late") == 1
