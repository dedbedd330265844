"""Prompts of token ids, by seed."""

import random

from tests.e2e.models import VOCABULARY


def tokens(count: int, seed: int = 1) -> list[int]:
    """`count` ids; a longer prompt of the same seed starts with the shorter one."""
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(count)]
