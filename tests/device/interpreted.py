"""A device without a GPU: queues whose work is late, kernels in Triton's interpreter.

Import this before `kvferry.device.kernels`: where there is no GPU it turns the interpreter on, for
this process only: those that tests start must not inherit that.
"""

import ctypes
import os
import random
from array import array
from collections import deque
from collections.abc import Callable

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    del os.environ["TRITON_INTERPRET"]
    knobs.propagate_env = False
    knobs.runtime.interpret = True
from kvferry.device import kernels  # noqa: E402, F401


class Mark:
    """Passed when the queue has come to it."""

    is_passed = False


class LateQueue:
    """Runs nothing until somebody asks `LateDevice` for progress."""

    def __init__(self) -> None:
        self.items: deque[Callable[[], None] | Mark | tuple[str, Mark]] = deque()

    def put(self, work: Callable[[], None]) -> None:
        self.items.append(work)

    def mark(self) -> Mark:
        mark = Mark()
        self.items.append(mark)
        return mark

    def wait(self, mark: Mark) -> None:
        self.items.append(("wait", mark))

    def step(self) -> bool:
        """Does the first item, if it need not wait."""
        if not self.items:
            return False
        first = self.items[0]
        if isinstance(first, tuple):
            if not first[1].is_passed:
                return False
        elif isinstance(first, Mark):
            first.is_passed = True
        else:
            first()
        self.items.popleft()
        return True


class LateDevice:
    """Stands in for `gpu.Cuda`. Which queue goes on is chance, but that the engine's comes first
    where the seed is even, and last where it is odd. One thread asks for progress."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._is_engine_slow = bool(seed % 2)
        self._queues: list[LateQueue] = []
        self.engine = self.queue()

    def queue(self) -> LateQueue:
        self._queues.append(LateQueue())
        return self._queues[-1]

    def engine_queue(self) -> LateQueue:
        return self.engine

    def has_passed(self, mark: Mark) -> bool:
        for _ in range(self._chance.randint(0, 4)):
            self.step()
        return mark.is_passed

    def wait_for(self, mark: Mark) -> None:
        while not mark.is_passed:
            assert self.step(), "the queues wait for one another"

    def step(self) -> bool:
        queues = self._chance.sample(self._queues, len(self._queues))
        queues.sort(key=lambda queue: (queue is self.engine) is self._is_engine_slow)
        return any(queue.step() for queue in queues)

    def buffer(self, length_bytes: int) -> torch.Tensor:
        return torch.full((length_bytes,), 0xEE, dtype=torch.uint8)

    def memory(self, length_bytes: int) -> tuple[int, object]:
        memory = self.buffer(length_bytes)
        return memory.data_ptr(), memory

    def zero(self, address: int, length_bytes: int) -> None:
        ctypes.memset(address, 0, length_bytes)

    def slip(self, words: array) -> torch.Tensor:
        return torch.frombuffer(words, dtype=torch.int64).clone()

    def pin(self, address: int, length_bytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass
