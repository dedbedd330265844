"""Which loads pay: measured speed of loads against measured speed of prefill, in tokens.

Both are exponential averages over what this engine has seen; until both are known every load is
taken. Loads and trials of the store (see `trial`) say how fast it is; while no load pays, only
trials do. One thread: the scheduler's.
"""

WEIGHT = 0.25
"""Of the newest measurement."""

PREFILL_TOKENS_MIN = 256
"""A step with fewer tokens says little about the speed of prefill."""

TRIAL_EVERY_S = 10.0
"""Between trials of a store that is not known, or is too slow: it may have become faster."""


class CostModel:
    """`load_tokens_per_s`, `prefill_tokens_per_s`: the averages; 0 while unknown."""

    def __init__(self, is_enabled: bool):
        self._is_enabled = is_enabled
        self.load_tokens_per_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self._has_declined = False
        self._next_trial_s = 0.0

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
        self._has_declined = True
        return False

    def wants_trial(self, now_s: float) -> bool:
        """Whether the store's speed is to be tried now. Asked at each step."""
        if now_s < self._next_trial_s or not self._is_enabled:
            return False
        if self.load_tokens_per_s and not self._has_declined:
            return False
        self._has_declined = False
        self._next_trial_s = now_s + TRIAL_EVERY_S
        return True


def _blend(old: float, new: float) -> float:
    return new if not old else old + WEIGHT * (new - old)
