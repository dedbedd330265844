"""Contract of a copier: gathers blocks into staging and scatters staging into blocks.

One piece is one extent of one page. A gather writes the payloads of the extent's slices, with
zeros up to their padding, and leaves the header blocks alone; a scatter reads them. The order of
bytes is the canonical one of `layout`.

Life of a job:

1. `submit` names blocks and staging; both belong to the job until `poll` or `wait` returned it.
2. Jobs of one copier may run in any order and at the same time.
3. `finish(jobs)` is the fence: when it returns True, their blocks have been read (or written).

Threads: any thread may call; calls do not hold the GIL while bytes move. Which memory a copier
serves is fixed by its constructor: the regions of one cache group on one rank, and their
placement.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

SKIP = -1
"""In `Piece.blocks`: leave this block out (a scatter whose first blocks are there already)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks of one chunk, in order, and the address of the extent's first header block."""

    blocks: tuple[int, ...]
    staging_address: int


class Copier(Protocol):
    """See the module. Constructors only store; `open` acquires; `close` is idempotent."""

    def open(self) -> None: ...

    def close(self) -> None:
        """Finishes what was submitted, then lets go of threads and memory."""

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        """Blocks to staging. Returns the job's number."""

    def submit_scatter(self, pieces: Sequence[Piece]) -> int:
        """Staging to blocks. Returns the job's number."""

    def poll(self) -> list[int]:
        """Jobs done since the last poll, each exactly once. Never waits."""

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        """Waits until these jobs are done; False if time ran out. `poll` still returns them."""
