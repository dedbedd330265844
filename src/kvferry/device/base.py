"""Contract of a copier: gathers blocks into staging and scatters staging into blocks.

One piece is one extent of one page. A gather writes the payloads of the extent's slices, with
zeros up to their padding; what the header blocks hold after it is undefined (the page store stamps
them). A scatter reads the payloads. The order of bytes is the canonical one of `layout`.

Life of a job:

1. `order_gathers` or `order_scatters` says, on the engine's thread, that the device must be done
   with all that the engine has given it so far before jobs submitted from now on touch blocks.
2. `submit` names blocks and staging; both belong to the job until `poll` returned it.
3. Jobs of one copier may run in any order and at the same time.
4. `finish(jobs)` is the fence, on the engine's thread: when it returns True, the blocks have been
   read (or written), or will be before whatever the engine's thread gives the device from then on
   may touch them. Nobody has waited for the device. Staging is the job's until `poll`.

A copier with `proves_pages` computes the checksums of slices (docs/formats.md, over the padded
payload) where it copies them: those of a gather come with `poll`; a scatter whose piece says what
they should be writes nothing of that piece unless all of them are so, and `poll` says which pieces
failed. Other copiers refuse such pieces: who uses them lets the page store verify.

Threads: any thread may call, except as above; calls do not hold the GIL while bytes move. Which
memory a copier serves is fixed by its constructor: the regions of one cache group on one rank, and
their placement.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SKIP = -1
"""In `Piece.blocks`: leave this block out (a scatter whose first blocks are there already)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks of one chunk, in order, and the address of the extent's first header block.

    `checksums`: for a scatter, of the extent's slices; None: they have been verified already.
    """

    blocks: tuple[int, ...]
    staging_address: int
    checksums: tuple[int, ...] | None = None


class Done(NamedTuple):
    """A job that is done. `failed`: pieces of a scatter that did not have their checksums, by their
    place in it, in any order; nothing of them was written. `checksums`: of a gather's pieces, by
    slice; () if the copier does not prove pages."""

    job: int
    failed: tuple[int, ...] = ()
    checksums: tuple[tuple[int, ...], ...] = ()


class Copier(Protocol):
    """See the module. Constructors only store; `open` acquires; `close` is idempotent."""

    proves_pages: bool

    def open(self) -> None: ...

    def close(self) -> None:
        """Finishes what was submitted, then lets go of threads and memory."""

    def order_gathers(self) -> None:
        """Gathers submitted from now on read what the engine has computed so far. See above."""

    def order_scatters(self) -> None:
        """Scatters submitted from now on leave blocks alone while what the engine has computed so
        far may still read or write them. See above."""

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        """Blocks to staging. Returns the job's number."""

    def submit_scatter(self, pieces: Sequence[Piece]) -> int:
        """Staging to blocks. Returns the job's number. Raises ValueError if a piece has checksums
        and the copier does not prove pages, or not one for each slice."""

    def poll(self) -> list[Done]:
        """Jobs done since the last poll, each exactly once. Never waits."""

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        """The fence, see above; False if it does not hold in time. `poll` still returns the jobs;
        those that it has returned already are no obstacle."""
