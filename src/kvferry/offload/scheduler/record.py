"""What the planner knows of one request. One thread: the scheduler's."""

from dataclasses import dataclass, field

from kvferry.catalog.runner import Ticket
from kvferry.keys import ROOT_PARENT
from kvferry.offload.base import Request
from kvferry.offload.scheduler.lookup import Lookup, PartAnswer


@dataclass(slots=True)
class Chain:
    """One part's chunks of one request.

    `keys`: of each chunk known so far. `present`: chunks that the catalog has. `next_store`: first
    chunk not planned.
    """

    keys: list[bytes]
    present: frozenset[int] = frozenset()
    next_store: int = 0

    def parent(self, chunk_index: int) -> bytes:
        return self.keys[chunk_index - 1] if chunk_index else ROOT_PARENT


@dataclass(slots=True)
class Record:
    """One request from `on_new_request` to `finished`.

    `lookup`, `ticket`: the lookup under way or answered; None once its answer was used for a
    load, or it was void. `answer`: its result without the keys that were in quarantine at
    `answer_version`. `deadline_s`: when the request stops waiting.
    `local_tokens`, `loaded_end`: what the engine had and where our load ended, at the last
    admission. `computed_tokens`: KV that existed after the step of the last look; 0 while
    preempted. `is_decoding`: since that step all known tokens but the last have KV.
    `in_sight_tokens`: what the request may still store, as the demand for slots counts it.
    `place`: where it stood among the requests of the last step in which it was looked for.
    `is_storable` turns False when blocks of foreign origin are found below it: see `origin`.
    """

    request_id: str
    request: Request
    deadline_s: float
    chains: list[Chain] = field(default_factory=list)
    lookup: Lookup | None = None
    ticket: Ticket | None = None
    answer: tuple[PartAnswer, ...] | None = None
    answer_version: int = 0
    answered_s: float = 0.0
    asked_count: int = 0
    local_tokens: int = 0
    loaded_end: int = 0
    next_boundary: int = 0
    computed_tokens: int = 0
    is_declined: bool = False
    in_sight_tokens: int = 0
    is_storable: bool = True
    is_scheduled: bool = False
    is_decoding: bool = False
    place: int = -1

    @property
    def has_begun(self) -> bool:
        """Whether it has KV of ours or the engine's."""
        return bool(self.computed_tokens or self.loaded_end)
