"""One request: what the planner may know of it, and the true answer, which is no secret here."""

import math
from collections.abc import Sequence
from enum import Enum

from kvferry.keys import encode_extras
from kvferry.testing.world.meaning import next_digest, root_digest

VOCABULARY = 50


class Status(Enum):
    WAITING = 1
    LOADING = 2
    RUNNING = 3
    FINISHED = 4


class SimRequest:
    """`computed`: tokens with KV after all planned steps. `weights`: what its KV is made with;
    nobody else's once its prefix is foreign. `admission` counts how often it lost its blocks, so
    that results of a step before that are told from later ones. An `offload.base.Request`."""

    def __init__(self, request_id: str, prompt: Sequence[int], answer_count: int, salt: bytes):
        self.request_id = request_id
        self.tokens = list(prompt)
        self.prompt_count = len(self.tokens)
        self.end_count = self.prompt_count + answer_count
        self.is_cacheable = True
        self.is_readable = True
        self.can_be_named = True
        self.status = Status.WAITING
        self.tables: list[list[int]] = []
        self.computed = 0
        self.written = 0  # tokens with KV after all steps that were executed
        self.unknown_count = 0  # answers that are computed and not known yet
        self.admission = 0
        self.weights = b""
        self.asked_s = 0.0
        self.waited_s = 0.0
        self.load: Load | None = None
        self._extras = encode_extras([("salt", salt)]) if salt else b""
        self._digests = [root_digest(self._extras)]
        self._truth = list(prompt)

    def name(self) -> bool:
        self.is_cacheable = self.is_cacheable and self.can_be_named
        return self.is_cacheable

    def extras(self, start_token: int, end_token: int) -> bytes:
        assert self.is_cacheable, "a key of what has no name"
        return self._extras if start_token == 0 else b""

    def digest(self, count: int) -> bytes:
        """Stands for the first `count` tokens of prompt and true answer."""
        while len(self._digests) <= count:
            token = self.true_token(len(self._digests) - 1)
            self._digests.append(next_digest(self._digests[-1], token))
        return self._digests[count]

    def true_token(self, position: int) -> int:
        while len(self._truth) <= position:
            self._truth.append(self.digest(len(self._truth))[0] % VOCABULARY)
        return self._truth[position]

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) >= self.end_count


class Load:
    """What a request waits for. `ours`: the ranks that have not reported yet; a sibling's load has
    none. `begun_s`: when the last rank was told. `late_count`: how often it was not there after its
    deadline. `weights`: what the loaded bytes are made with."""

    def __init__(self, start: int, end: int, ranks: Sequence[int], weights: bytes):
        self.start = start
        self.end = end
        self.ours = set(ranks)
        self.begun_s = math.inf
        self.late_count = 0
        self.weights = weights
        self.is_sibling = not ranks
        self.has_failed = False
        self.failed_blocks: set[int] = set()
        self.is_aborted = False
        self.is_done = False
