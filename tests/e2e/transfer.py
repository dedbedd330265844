"""A pair of engines over NIXL, as a test drives them: what a router does."""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.transfer.params import Offer, appoint, read
from tests.e2e.engine import SECRET, Answers, EngineProcess

WANTED = {"do_remote_decode": True}
PUSH = {"direction": "push", "page_tokens_max": 64, "early_s": 10.0}
UNHURRIED = {"claim_deadline_s": 30.0, "dial_timeout_s": 30.0, "read_deadline_s": 60.0}
"""Exact counts must not depend on how busy the machine is; tests of deadlines set their own."""
TOLERANCE = 1e-4
"""A single engine's own answers differ by 3e-5 between two shapes of prefill."""


def settings(role: str, **extra: Any) -> dict[str, Any]:
    """`LLM` arguments of an engine with the transfer connector."""
    return {
        "kv_transfer_config": {
            "kv_connector": "FerryTransferConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tokens_min": 1, **UNHURRIED, **extra},
        }
    }


def prefill(
    producer: EngineProcess, prompts: Sequence[Sequence[int]], **arguments: Any
) -> list[dict[str, Any] | None]:
    """What each prompt's client is given to carry."""
    answers = producer.generate(
        prompts, max_tokens=1, transfers=[WANTED] * len(prompts), **arguments
    )
    return [answer.transfer for answer in answers.requests]


def at_once(
    producer: EngineProcess, consumer: EngineProcess, offer: Offer, prompt: Sequence[int]
) -> Answers:
    """Answered here while it is computed there: what a router does that knows the producer by an
    earlier `offer`."""
    there, here = appoint(SECRET.encode(), offer, secrets.token_bytes(16))
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(producer.generate, [prompt], max_tokens=1, transfers=[there])
        answers = consumer.generate([prompt], transfers=[here])
        computed.result()
    return answers


def known(producer: EngineProcess, prompt: Sequence[int]) -> Offer:
    """What a producer says of itself with any answer."""
    (carried,) = prefill(producer, [prompt])
    offer, reason = read(SECRET.encode(), carried)
    assert offer is not None, reason
    return offer


def hand_over(
    producer: EngineProcess,
    consumer: EngineProcess,
    prompts: Sequence[Sequence[int]],
    **arguments: Any,
) -> Answers:
    """Prompts are computed there and answered here."""
    carried = prefill(producer, prompts)
    assert all(carried), "the producer offers nothing"
    return consumer.generate(prompts, transfers=carried, **arguments)


def assert_same(answers: Answers, plain: Answers, tolerance: float = TOLERANCE) -> None:
    """Tokens are equal, and log-probabilities as far as those of one engine are."""
    assert answers.tokens == plain.tokens
    for some, others in zip(answers.logprobs, plain.logprobs, strict=True):
        assert max(abs(a - b) for a, b in zip(some, others, strict=True)) < tolerance
