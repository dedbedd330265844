"""Which loads pay: measured bandwidth of loads against measured speed of prefill.

Both are exponential averages over what this engine has seen; until both are known every load is
taken, which is how they become known. One thread: the scheduler's.
"""

from kvferry.offload.base import Part

WEIGHT = 0.25
"""Of the newest measurement."""

PREFILL_TOKENS_MIN = 256
"""A step with fewer tokens says little about the speed of prefill."""

PROBE_EVERY = 16
"""One in so many declined loads is taken after all: a store may have become faster."""


class CostModel:
    def __init__(self, is_enabled: bool):
        self._is_enabled = is_enabled
        self._load_bytes_per_s = 0.0
        self._prefill_tokens_per_s = 0.0
        self._declined_count = 0

    def saw_load(self, loaded_bytes: int, loading_s: float) -> None:
        if loaded_bytes and loading_s > 0:
            self._load_bytes_per_s = _blend(self._load_bytes_per_s, loaded_bytes / loading_s)

    def saw_step(self, tokens: int, duration_s: float) -> None:
        if tokens >= PREFILL_TOKENS_MIN and duration_s > 0:
            self._prefill_tokens_per_s = _blend(self._prefill_tokens_per_s, tokens / duration_s)

    def pays(self, parts: tuple[Part, ...], token_count: int) -> bool:
        """Whether loading this many tokens is expected to take less time than computing them."""
        if not self._is_enabled or not self._load_bytes_per_s or not self._prefill_tokens_per_s:
            return True
        token_bytes = sum(
            part.geometry.page_bytes / part.chunk_tokens
            for part in parts
            if part.window_tokens is None
        )
        load_s = token_count * token_bytes / self._load_bytes_per_s
        if load_s < token_count / self._prefill_tokens_per_s:
            return True
        self._declined_count += 1
        return self._declined_count % PROBE_EVERY == 0


def _blend(old: float, new: float) -> float:
    return new if not old else old + WEIGHT * (new - old)
