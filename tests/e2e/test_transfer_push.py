"""A producer that pushes and a consumer answer as a single engine does: asked one after the other,
or both at once, whatever becomes of one of them."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from kvferry.transfer.params import appoint
from tests.e2e import transfer
from tests.e2e.engine import PATIENCE_S, SECRET, Answers, EngineError, EngineProcess
from tests.e2e.prompts import tokens
from tests.e2e.transfer import PUSH, assert_same

STEP_TOKENS = 64
"""Prompts take several steps: pages are written while others are computed."""
LENGTHS = (2, 33, 64, 65, 97, 300, 700)
NAMES = ("first", "after", "aborted", "killed", "again")


def prompt_of(name: str, count: int = 300) -> list[int]:
    return tokens(count, seed=sum(name.encode()) * 1000 + count)


@dataclass
class Pair:
    """`plain`: a single engine's answers, by prompt. `offer`: of the producer's last answer."""

    producer: EngineProcess
    consumer: EngineProcess
    plain: dict[tuple[int, ...], Answers]
    offer: object = None
    met_count: int = field(default=0)

    def learn(self) -> None:
        self.offer = transfer.known(self.producer, prompt_of("first"))

    def appoint(self):
        self.met_count += 1
        name = self.met_count.to_bytes(16, "little")
        return appoint(SECRET.encode(), self.offer, name)

    def check(self, prompt: list[int], answers: Answers, external: int, local: int = 0) -> None:
        assert_same(answers, self.plain[tuple(prompt)])
        assert (answers.external_hit_tokens, answers.local_hit_tokens) == (external, local)

    def both_at_once(self, prompt: list[int]) -> Answers:
        return transfer.at_once(self.producer, self.consumer, self.offer, prompt)

    def pages(self, outcome: str = "written") -> float:
        return self.consumer.metrics().get(f"vllm:kvferry_transfer_pages:{outcome}", 0)

    def rest(self) -> None:
        self.consumer.wait_for_rest()
        self.producer.wait_for_rest()


@pytest.fixture(scope="module")
def pair(engine_a, engine_b, model) -> Iterator[Pair]:
    few = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 8}
    prompts = [prompt_of("length", count) for count in LENGTHS] + [prompt_of(n) for n in NAMES]
    prompts.append(prompt_of("aborted there", 1500))
    engine_b.open(model("full"), **few)
    plain = {tuple(prompt): engine_b.generate([prompt]) for prompt in prompts}
    engine_b.close()
    engine_a.open(model("full"), **few, **transfer.settings("kv_producer", **PUSH))
    engine_b.open(model("full"), **few, **transfer.settings("kv_consumer", **PUSH))
    made = Pair(engine_a, engine_b, plain)
    made.learn()
    yield made
    engine_a.kill()
    engine_a.start()
    engine_b.close()


@pytest.mark.parametrize("count", LENGTHS)
def test_both_are_asked_at_once(pair, count):
    """Every token but the last came from there, page by page."""
    prompt, before = prompt_of("length", count), pair.pages()
    pair.check(prompt, pair.both_at_once(prompt), external=count - 1)
    assert pair.pages() - before == -(-(count - 1) // 64)


def test_one_is_asked_after_the_other(pair):
    """As routers do that know of no appointments."""
    prompt = prompt_of("after")
    (carried,) = transfer.prefill(pair.producer, [prompt])
    pair.check(prompt, pair.consumer.generate([prompt], transfers=[carried]), external=299)
    pair.check(prompt, pair.both_at_once(prompt), external=11, local=288)
    pair.rest()


def test_the_consumer_aborts_while_pages_come(pair):
    """Its blocks are free at once; its slots when the producer has said that nothing comes."""
    prompt = prompt_of("aborted")
    there, here = pair.appoint()
    pair.consumer.inject("hold_answers")
    try:
        with ThreadPoolExecutor(1) as pool:
            wanted = {"max_tokens": 1, "transfers": [there]}
            computed = pool.submit(pair.producer.generate, [prompt], **wanted)
            assert pair.consumer.abort(prompt, "reads", transfer=here)["reads"] >= 1
            computed.result()
        give_up_s = time.monotonic() + PATIENCE_S
        while (state := pair.consumer.state())["requests"] and time.monotonic() < give_up_s:
            time.sleep(0.05)  # the engine steps between calls
        assert (state["requests"], state["blocks_in_use"]) == (0, 0)
        assert state["reads"] >= 1
    finally:
        pair.consumer.restore()
    pair.rest()
    pair.check(prompt, pair.both_at_once(prompt), external=299)
    pair.rest()


def test_the_prefill_is_aborted_when_some_pages_have_been_written(pair):
    """They were written while it ran. The consumer computes at once, long before any deadline."""
    prompt, before = prompt_of("aborted there", 1500), pair.pages()
    there, here = pair.appoint()
    answers: list[Answers] = []
    thread = threading.Thread(
        target=lambda: answers.append(pair.consumer.generate([prompt], transfers=[here]))
    )
    thread.start()
    assert pair.producer.abort(prompt, "pages", transfer=there)["pages"] >= 1
    thread.join(PATIENCE_S)
    assert_same(answers[0], pair.plain[tuple(prompt)])
    assert 1 <= pair.pages() - before < -(-1499 // 64)
    assert pair.consumer.metrics()["vllm:kvferry_transfer_requests:failed"] == 1
    pair.rest()


def test_an_appointment_that_nobody_signed_is_computed_here(pair):
    prompt = prompt_of("again")
    _, here = pair.appoint()
    forged = here | {"kvferry_push": here["kvferry_push"][:-4] + "AAA="}
    before = pair.consumer.metrics().get("vllm:kvferry_transfer_requests:forged", 0)
    pair.check(prompt, pair.consumer.generate([prompt], transfers=[forged]), external=0)
    after = pair.consumer.metrics()["vllm:kvferry_transfer_requests:forged"]
    assert after == before + 1


def test_the_producer_is_killed_while_it_pushes(pair):
    """Last: it does not come back."""
    prompt = prompt_of("killed")
    there, here = pair.appoint()

    def prefill() -> None:
        with contextlib.suppress(EngineError, BrokenPipeError, OSError):
            pair.producer.generate([prompt], max_tokens=1, transfers=[there])

    thread = threading.Thread(target=prefill)
    thread.start()
    killer = threading.Timer(0.3, pair.producer.kill)
    killer.start()
    answers = pair.consumer.generate([prompt], transfers=[here])
    assert_same(answers, pair.plain[tuple(prompt)])
    killer.join()
    thread.join(PATIENCE_S)
    give_up_s = time.monotonic() + PATIENCE_S
    while (state := pair.consumer.state())["claims"] and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert (state["requests"], state["blocks_in_use"], state["loads"]) == (0, 0, 0)
