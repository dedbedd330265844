"""A pair of engines over NIXL, as a test drives them: what a router does."""

from collections.abc import Sequence
from typing import Any

from tests.e2e.engine import Answers, EngineProcess

WANTED = {"do_remote_decode": True}
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
