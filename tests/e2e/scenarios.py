"""What engines with and without kvferry are asked, and how much of it a warm engine must load.

A scenario is one configuration of engines and the rounds that each of them answers in order: a
round is one batch. `external` and `local` are what vLLM must count in an engine that computed
nothing before: tokens that come from the store, and from its own prefix cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.e2e import installed
from tests.e2e.prompts import tokens

Prompts = tuple[list[int], ...]


@dataclass(frozen=True)
class Round:
    """`salts`, `adapters`: one for each prompt, or none at all. `allowed`: the answers' tokens."""

    prompts: Prompts
    external: int
    local: int = 0
    max_tokens: int = 8
    salts: tuple[str | None, ...] = ()
    adapters: tuple[str | None, ...] = ()
    allowed: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scenario:
    """`spoils_process`: no other engine can be opened in its process."""

    name: str
    rounds: tuple[Round, ...]
    model: str = "full"
    settings: Mapping[str, Any] = field(default_factory=dict)
    spoils_process: bool = False


def alone(prompt: list[int], external: int, local: int = 0, **more: Any) -> Round:
    return Round((prompt,), external, local, **more)


def fork(shared_count: int, count: int, seed: int) -> list[int]:
    """`shared_count` tokens of seed 1, then others."""
    return tokens(shared_count) + tokens(count - shared_count, seed)


def batch(*counts: int) -> Prompts:
    return tuple(tokens(count, 100 + count) for count in counts)


def repeating(count: int, seed: int) -> list[int]:
    """A text that repeats itself, for speculation to guess from."""
    return (tokens(40, seed) * count)[:count]


LENGTHS = Scenario(
    "lengths",
    (
        alone(tokens(63, 11), 0),
        alone(tokens(64, 12), 64),
        alone(tokens(65, 13), 64),
        alone(tokens(127, 14), 64),
        alone(tokens(128, 15), 128),
        alone(tokens(129, 16), 128),
        alone(tokens(970, 17), 960),
        alone(tokens(1000), 960),
        alone(fork(500, 1000, 2), 960 - 480, local=480),
        alone(fork(64, 970, 3), 960 - 64, local=64),
        alone(tokens(1000), 0, local=992),
    ),
)
SALTS = Scenario(
    "salts",
    (
        alone(tokens(300), 256),
        alone(tokens(300), 256, salts=("one",)),
        Round((tokens(400), tokens(400)), 768, salts=("two", "three")),
    ),
)
BATCHED = Scenario(
    "batched",
    (Round(batch(64, 130, 257, 320, 450, 610), 64 + 128 + 256 + 320 + 448 + 576),),
    settings={"async_scheduling": True},
)
CHUNKED_PREFILL = Scenario(
    "chunked-prefill",
    (
        Round(batch(300, 513, 705), 256 + 512 + 704),
        alone(tokens(970, 21), 960),
    ),
    settings={"max_num_batched_tokens": 96, "enable_chunked_prefill": True},
)
SMALL_CACHE = Scenario(
    "small-cache",
    (
        alone(tokens(700, 31), 640),
        alone(tokens(700, 32), 640),
        alone(tokens(700, 33), 640),
        alone(tokens(700, 31), 640),
        Round(tuple(tokens(250, seed) for seed in range(41, 46)), 5 * 192, max_tokens=100),
    ),
    settings={"num_gpu_blocks_override": 40, "max_model_len": 1024},
)
NO_PREFIX_CACHE = Scenario(
    "no-prefix-cache",
    (
        Round((tokens(500), fork(330, 400, 4)), 448 + 384),
        alone(tokens(500), 448),
        alone(fork(330, 640, 5), 640),
    ),
    settings={"enable_prefix_caching": False},
)
WINDOW = Scenario(
    "sliding-window",
    (
        alone(tokens(64, 51), 0),
        alone(tokens(65, 52), 64),
        alone(tokens(640, 53), 576),
        alone(tokens(641, 54), 640),
        alone(tokens(970, 55), 960),
        Round(batch(200, 330, 450), 192 + 320 + 448),
    ),
    model="window",
)
ADAPTERS = Scenario(
    "adapters",
    (
        alone(tokens(330), 320),
        alone(tokens(330), 320, adapters=("first",)),
        alone(tokens(330), 320, adapters=("second",)),
        Round((tokens(330), tokens(400, 61)), 384, local=320, adapters=("second", "first")),
    ),
    settings={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
)
SPECULATION = Scenario(
    "speculation",
    (
        alone(repeating(330, 71), 320, max_tokens=100, allowed=(7, 8, 9)),
        Round((repeating(200, 72), repeating(260, 73)), 192 + 256, max_tokens=40),
    ),
    settings={
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    },
    spoils_process=True,  # vLLM 0.32 on CPU stumbles over numba, which speculation imports
)
ALL = (
    LENGTHS,
    SALTS,
    BATCHED,
    CHUNKED_PREFILL,
    SMALL_CACHE,
    NO_PREFIX_CACHE,
    *((WINDOW,) if installed.SEVERAL_GROUPS_ARE_SERVED else ()),
    ADAPTERS,
    SPECULATION,
)
