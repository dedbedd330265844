"""What the scheduler half and the worker half of one engine say to each other.

    Producer --ProducerPlan--> ProducerRank       Consumer --ConsumerPlan--> ConsumerRank
             <--request ids---                             <--Report, Finished---

Plans go with the step's metadata to every rank; what ranks say comes back with a step's output.
All are `msgspec.Struct`s, encoded with msgpack.
"""

import msgspec

from kvferry.transfer.params import Offer

Tables = tuple[tuple[int, ...], ...]
"""Block ids by group of this engine; `device.base.SKIP` where there is none, or none is wanted."""


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A prefill has finished; its blocks are kept until every rank has said that it is over. `key`:
    of its tokens."""

    request_id: str
    transfer: bytes
    generation: bytes
    token_count: int
    tables: Tables
    key: bytes


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """A prefill that a reader was promised while it runs. It ends as a Hold, or is cancelled."""

    request_id: str
    transfer: bytes
    generation: bytes
    token_count: int
    key: bytes


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """When this step has been computed, the first tokens of a running prefill are final in these
    blocks, all of a group or none: a group from which blocks may be taken on the way has none."""

    request_id: str
    computed_tokens: int
    tables: Tables


class ProducerPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. `withdrawn`: running prefills whose blocks this step may overwrite; `cancelled`:
    those that end without being held."""

    holds: tuple[Hold, ...] = ()
    begins: tuple[Begin, ...] = ()
    progress: tuple[Progress, ...] = ()
    withdrawn: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits may load this: claim it and keep it claimed."""

    request_id: str
    offer: Offer


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fill these blocks with the tokens [start, end). Ends exactly once, in `Finished`."""

    request_id: str
    tables: Tables
    start_token: int
    end_token: int


class ConsumerPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. `drops`: requests that load nothing (more): those that are loading fail as soon as
    nothing of them is being scattered. `voids`: so do all that began before (the weights have
    changed)."""

    watches: tuple[Watch, ...] = ()
    loads: tuple[Load, ...] = ()
    drops: tuple[str, ...] = ()
    voids: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One rank's word. Each request that is watched is `granted` or `refused` (with a reason), and
    may be refused later although it was granted, unless it was dropped. `is_full`: too much is in
    quarantine to begin anything."""

    granted: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    is_full: bool = False

    def merge(self, other: "Report") -> "Report":
        """Of two ranks."""
        return Report(
            self.granted + other.granted,
            self.refused + other.refused,
            self.is_full or other.is_full,
        )


class Finished(msgspec.Struct, frozen=True):
    """Loads that ended since the last call; `failed` is a subset of `done`."""

    done: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
