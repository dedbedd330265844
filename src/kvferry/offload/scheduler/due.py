"""In which step a request must be looked at: most steps of most requests change nothing.

A request that decodes gets one token in a step. So one that is some tokens short of its next chunk
need not be looked at for as many steps, unless a step schedules more than one token of it. Where
many decode, those of several steps are looked at together: the first look of a step finds none of
its code in the processor's caches and takes ten times as long as the next ones. One thread: the
scheduler's.
"""

from collections.abc import Mapping

TOGETHER_STEPS = 4
MANY_REQUESTS = 64
"""Fewer in a step are looked at in the very step: an engine that goes idle takes no other one."""


class Due:
    """`_at`: the step in which a request is due, if that lies ahead; those in `_soon` are due in
    the next step that schedules them; those in `_waiting` once `release` was called."""

    def __init__(self) -> None:
        self._step = 0
        self._stride = 1
        self._soon: set[str] = set()
        self._at: dict[str, int] = {}
        self._later: dict[int, list[str]] = {}
        self._waiting: set[str] = set()

    @property
    def are_many(self) -> bool:
        """Whether the requests of the step are looked at together."""
        return self._stride > 1

    def soon(self, request_id: str) -> None:
        """Due as soon as it is scheduled."""
        self._soon.add(request_id)

    def after(self, request_id: str, token_count: int) -> None:
        """Due once `token_count` more tokens may have been computed, or a few steps later; soon
        if that is none."""
        if token_count <= 0:
            self._soon.add(request_id)
            return
        step = self._step + token_count
        step += -step % self._stride
        if not self._step < self._at.get(request_id, 0) <= step:
            self._at[request_id] = step
            self._later.setdefault(step, []).append(request_id)

    def wait(self, request_id: str) -> None:
        """Due when `release` is called."""
        self._waiting.add(request_id)

    def release(self) -> None:
        """Those that wait are due soon."""
        self._soon |= self._waiting
        self._waiting.clear()

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._soon.discard(request_id)
        self._waiting.discard(request_id)
        self._at.pop(request_id, None)

    def take(self, scheduled_tokens: Mapping[str, int], token_count: int) -> set[str]:
        """The requests of the next step that are due in it. `token_count`: of all requests."""
        self._step += 1
        self._stride = TOGETHER_STEPS if len(scheduled_tokens) >= MANY_REQUESTS else 1
        for request_id in self._later.pop(self._step, ()):
            if self._at.get(request_id) == self._step:
                self._soon.add(request_id)
        due: set[str] = set()
        if self._soon:
            due = self._soon & scheduled_tokens.keys()
            self._soon -= due
        further_tokens = token_count - len(scheduled_tokens)
        if further_tokens > sum(scheduled_tokens[name] - 1 for name in due):
            due.update(name for name, count in scheduled_tokens.items() if count > 1)
        return due
