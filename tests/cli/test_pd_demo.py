"""The demo must say no when a transfer did not happen, or was wrong."""

from dataclasses import replace

import pytest

from kvferry.cli.demo_asking import Told
from kvferry.cli.pd_demo import problems

PROMPT = list(range(300))
PLAIN = Told("alone", PROMPT, 0, 3.0, [7, 8, 9], "Four hundred.", None)
PRODUCER = replace(PLAIN, engine="producer", token_ids=[7], transfer={"kvferry_transfer": "x"})
CONSUMER = replace(PLAIN, engine="consumer", loaded_tokens=299)


def test_what_is_right_passes():
    assert problems(PLAIN, PRODUCER, CONSUMER) == []


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ({"transfer": None}, {}),
        ({"token_ids": [8]}, {}),
        ({"loaded_tokens": 64}, {}),
        ({}, {"loaded_tokens": 0}),
        ({}, {"loaded_tokens": 256}),
        ({}, {"token_ids": [7, 8, 1]}),
    ],
)
def test_each_wrong_part_is_a_problem(producer, consumer):
    assert len(problems(PLAIN, replace(PRODUCER, **producer), replace(CONSUMER, **consumer))) == 1
