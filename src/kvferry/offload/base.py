"""What the two halves of the offload connector and the engine's adapter say to each other.

    adapter (scheduler) --> Planner --Plan--> adapter --> (step's metadata) --> Jobs
    adapter (scheduler) <-- Planner <--Report-- adapter <-- (worker metadata) <-- Jobs

A *part* is one cache group of one pipeline stage: it has its own namespace, keys and pages. A
chunk of tokens is a hit only if every part that needs it can serve it. All messages are
`msgspec.Struct`s, encoded with msgpack: nothing here is pickled by its own rules.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvferry.catalog.base import PACKED_HIT
from kvferry.keys import DIGEST_BYTES
from kvferry.layout import Address, PageGeometry, Placement, Region

SLOT = PACKED_HIT
"""Segment, slot, generation; all zeros: none."""


class Part(msgspec.Struct, frozen=True):
    """One part as the scheduler side knows it: equal on all ranks of a stage.

    `group_index`: position in the engine's block tables, good inside this engine only.
    `window_tokens`: tokens before a boundary that must be there to go on from it; None: all.
    """

    stage: int
    group_index: int
    namespace: bytes
    group: int
    block_tokens: int
    chunk_tokens: int
    slice_count: int
    payload_bytes: int
    description: str
    window_tokens: int | None = None

    @property
    def geometry(self) -> PageGeometry:
        return PageGeometry(self.slice_count, self.payload_bytes, self.chunk_tokens)


class Identity(msgspec.Struct, frozen=True):
    """What one rank is: sent in its first report. Parts of one stage must be equal on all its
    ranks; `store_id` on all ranks."""

    rank: int
    rank_count: int
    stage: int
    store_id: bytes
    parts: tuple[Part, ...]


class LocalPart(msgspec.Struct, frozen=True):
    """One part as a worker knows it: where its bytes lie. Never leaves the process."""

    part: Part
    regions: tuple[Region, ...]
    placement: Placement

    @property
    def extent_bytes(self) -> int:
        """What this rank holds of one page."""
        return self.placement.slice_count * self.part.geometry.slice_bytes


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks of one part, in columns, so that the scheduler side only slices.

    `keys`: 32 bytes each, of chunks `first_chunk` on; `parent`: the key before the first.
    `slots`: 24 bytes each, segment, slot and generation as `SLOT` packs them.
    `blocks`: block ids of all chunks in order, as many for each; `device.base.SKIP` or the null
    block where there is none.
    """

    part_index: int
    first_chunk: int
    parent: bytes
    keys: bytes
    slots: bytes
    blocks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.keys) // DIGEST_BYTES

    def chunks(self) -> Iterator["Chunk"]:
        """The span row by row."""
        parent, width = self.parent, len(self.blocks) // len(self)
        for index, packed in enumerate(SLOT.iter_unpack(self.slots)):
            segment, slot, generation = packed
            key = self.keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            blocks = self.blocks[index * width : (index + 1) * width]
            yield Chunk(
                self.first_chunk + index, key, parent, Address(segment, slot), generation, blocks
            )
            parent = key


class Chunk(NamedTuple):
    """One row of a span."""

    chunk_index: int
    key: bytes
    parent: bytes
    address: Address
    generation: bytes
    blocks: tuple[int, ...]


class Store(msgspec.Struct, frozen=True, array_like=True):
    """Store these chunks: their blocks are final after this step's forward. `lease_s`: what is
    surely left of their reservations when the plan was made."""

    span: Span
    lease_s: float


class Load(msgspec.Struct, frozen=True, array_like=True):
    """All loads of one request: the tokens [start_token, end_token), in whole blocks. It ends
    exactly once, in `Finished`, at most `deadline_s` after the worker got it."""

    request_id: str
    spans: tuple[Span, ...]
    start_token: int
    end_token: int
    deadline_s: float


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One step, scheduler to worker.

    `overwritten`: every block that this step may overwrite: what it allocated newly, for whatever
    reason. When `Jobs.before_step` returns, no gather still needs one of them.
    `rewritten`: those of them that the engine may have written already when it calls
    `Jobs.before_step`. What was not gathered from them before is lost.
    `parts`: what `part_index` counts; empty until all ranks have agreed who they are.
    `late_stores`: blocks that were final before this step and may be lost in it.
    `drop_stores`: the namespace has changed (weights, reset): stores under way are dropped, loads
    under way fail.
    `tries_store`: somebody wants to know how fast the store can be read.
    """

    parts: tuple[tuple[int, int, bytes], ...] = ()  # stage, group index, namespace
    stores: tuple[Store, ...] = ()
    late_stores: tuple[Store, ...] = ()
    loads: tuple[Load, ...] = ()
    overwritten: tuple[int, ...] = ()
    drop_stores: bool = False
    rewritten: tuple[int, ...] = ()
    tries_store: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One rank's word to the scheduler side.

    `failed_keys`: (namespace, key) that a load could not read or verify; they arrive no later
    than the report that ends the request's load. `loaded_tokens`: of the loads that ended since
    the last report, and of trials. `loading_s`: time since then during which one was under way.
    """

    identities: tuple[Identity, ...] = ()
    failed_keys: tuple[tuple[bytes, bytes], ...] = ()
    loaded_tokens: int = 0
    loading_s: float = 0.0

    def merge(self, other: "Report") -> "Report":
        """Of two ranks, in one step: they load the same tokens at the same time."""
        return Report(
            self.identities + other.identities,
            self.failed_keys + other.failed_keys,
            max(self.loaded_tokens, other.loaded_tokens),
            max(self.loading_s, other.loading_s),
        )


class Finished(msgspec.Struct, frozen=True):
    """Loads that ended since the last call. `failed` is a subset of `done`; `failed_blocks` are
    the blocks of failed chunks and of all later ones of the same request."""

    done: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    failed_blocks: frozenset[int] = frozenset()


class Request(Protocol):
    """What the planner must know of a request. The adapter's object; read on any thread, so what
    it returns does not change while the request lives, except that `tokens` grows at its end."""

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and accepted output, known ids only."""

    @property
    def is_cacheable(self) -> bool:
        """False: neither looked up nor stored (sessions, media without a name, ...). May turn
        False in `name`."""

    @property
    def is_readable(self) -> bool:
        """False: not looked up (prompt log-probabilities, "skip reading the cache")."""

    def name(self) -> bool:
        """Finds out what takes time to name: the files of an adapter. On the runner's thread,
        before `extras`. False: nothing names the request, it is not cacheable from now on."""

    def extras(self, start_token: int, end_token: int) -> bytes:
        """Encoded extra key inputs (`keys.encode_extras`) of the tokens [start, end): LoRA
        digest and salt in the first chunk, images where they lie."""


class Table(Protocol):
    """Block ids of one cache group of a request, in the order of its tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> list[int]: ...


Tables = Sequence[Table]
"""By cache group."""


class Step(msgspec.Struct, frozen=True):
    """One step as the scheduler decided it.

    `request_ids`: who computes, in the order in which the scheduler took them, so that whoever
    shares a block comes after the one who fills it; `computed_tokens`: of each, before the step;
    `scheduled_tokens`: in the step, `token_count` of them in all. Tokens [0, computed + scheduled)
    have KV after the forward, but only `Request.tokens` are known and accepted.

    `new_blocks`: all ids that were allocated newly since the last step, for whatever request and
    reason (also for loads of any connector, and the targets of block copies), and no others: not
    what a prefix cache hit shares. `rewritten`: those that the engine copies into or zeroes before
    the workers see the plan.
    """

    request_ids: Sequence[str]
    computed_tokens: Sequence[int]
    scheduled_tokens: Mapping[str, int]
    token_count: int
    preempted: Collection[str]
    new_blocks: Collection[int]
    tables: Callable[[str], Tables]  # of a request of the step, now
    rewritten: Collection[int] = ()
