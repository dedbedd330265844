"""Which loads pay: measured speed of loads against measured speed of prefill, in tokens.

Both are exponential averages over what this engine has seen; until both are known every load is
taken, which is how they become known. One thread: the scheduler's.
"""

WEIGHT = 0.25
"""Of the newest measurement."""

PREFILL_TOKENS_MIN = 256
"""A step with fewer tokens says little about the speed of prefill."""

PROBE_EVERY = 16
"""One in so many declined loads is taken after all: a store may have become faster."""


class CostModel:
    """`load_tokens_per_s`, `prefill_tokens_per_s`: the averages; 0 while unknown."""

    def __init__(self, is_enabled: bool):
        self._is_enabled = is_enabled
        self.load_tokens_per_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self._declined_count = 0

    def saw_load(self, tokens: int, duration_s: float) -> None:
        if tokens and duration_s > 0:
            self.load_tokens_per_s = _blend(self.load_tokens_per_s, tokens / duration_s)

    def saw_step(self, tokens: int, duration_s: float) -> None:
        if tokens >= PREFILL_TOKENS_MIN and duration_s > 0:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / duration_s)

    def pays(self) -> bool:
        """Whether loading tokens is expected to take less time than computing them."""
        is_known = self.load_tokens_per_s and self.prefill_tokens_per_s
        if not self._is_enabled or not is_known:
            return True
        if self.load_tokens_per_s > self.prefill_tokens_per_s:
            return True
        self._declined_count += 1
        return self._declined_count % PROBE_EVERY == 0


def _blend(old: float, new: float) -> float:
    return new if not old else old + WEIGHT * (new - old)
