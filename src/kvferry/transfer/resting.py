"""Slots of staging after an operation that was lost: that proves nothing about its last bytes."""

from kvferry.clock import Clock
from kvferry.device.staging import Staging


class Resting:
    """Gives each slot back to `staging` when it has been out of use for `rest_s`. One thread: the
    mover's."""

    def __init__(self, staging: Staging, clock: Clock, rest_s: float):
        self._staging = staging
        self._clock = clock
        self._rest_s = rest_s
        self._slots: list[tuple[float, int]] = []  # until when

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: int) -> None:
        self._slots.append((self._clock.now_s() + self._rest_s, slot))

    def step(self) -> None:
        now_s = self._clock.now_s()
        for until_s, slot in self._slots:
            if now_s >= until_s:
                self._staging.give_back(slot)
        self._slots = [rest for rest in self._slots if now_s < rest[0]]
