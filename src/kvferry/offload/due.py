"""In which step a request must be looked at: most steps of most requests change nothing.

A request that decodes gets one token in a step. So one that is some tokens short of its next chunk
need not be looked at for as many steps, unless a step schedules more than one token of it. One
thread: the scheduler's.
"""

from collections.abc import Mapping


class Due:
    """`_at`: the step in which a request is due, if that lies ahead; those in `_soon` are due in
    the next step that schedules them."""

    def __init__(self) -> None:
        self._step = 0
        self._soon: set[str] = set()
        self._at: dict[str, int] = {}
        self._later: dict[int, list[str]] = {}

    def soon(self, request_id: str) -> None:
        """Due as soon as it is scheduled."""
        self._soon.add(request_id)

    def after(self, request_id: str, token_count: int) -> None:
        """Due once `token_count` more tokens may have been computed; soon if that is none."""
        if token_count <= 0:
            self._soon.add(request_id)
            return
        step = self._step + token_count
        if not self._step < self._at.get(request_id, 0) <= step:
            self._at[request_id] = step
            self._later.setdefault(step, []).append(request_id)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._soon.discard(request_id)
        self._at.pop(request_id, None)

    def take(self, scheduled_tokens: Mapping[str, int]) -> set[str]:
        """The requests of the next step that are due in it."""
        self._step += 1
        for request_id in self._later.pop(self._step, ()):
            if self._at.get(request_id) == self._step:
                self._soon.add(request_id)
        due = self._soon & scheduled_tokens.keys() if self._soon else set()
        self._soon -= due
        if max(scheduled_tokens.values(), default=0) > 1:
            due.update(name for name, count in scheduled_tokens.items() if count > 1)
        return due
