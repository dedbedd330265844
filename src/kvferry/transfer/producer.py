"""The producer's scheduler half: which finished requests are kept for a reader, and what their
clients get to carry.

A request's blocks stay until all ranks have said that its lease is over: the scheduler alone frees
them. What is kept is capped; beyond that a request simply has no remote KV.

Where the producer pushes, a request may have an appointment: its lease begins before it has blocks
(`appointed`), ranks hear what is computed (`progress`) and what is taken from it (`withdraw`), and
it ends as others do, or is `cancel`led. One thread: the scheduler's.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry import _native
from kvferry.clock import Clock
from kvferry.keys import ROOT_PARENT
from kvferry.metrics import Metrics
from kvferry.transfer.halves import Begin, Hold, ProducerPlan, Progress, Tables
from kvferry.transfer.lease import REMEMBERED_MAX
from kvferry.transfer.params import ID_BYTES, Offer, mint, read_appointment, wants_remote_decode
from kvferry.transfer.settings import Settings


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is to others. `boot`: 16 random bytes, fresh in every start. `namespace`: the
    digest of its compatibility fields."""

    boot: bytes
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens whose KV is in the blocks, and what else went into it (`keys.encode_extras`). An
    engine's own prefixes may look for that when they are asked: it may be in files."""

    tokens: Sequence[int]
    extras: bytes = b""

    def extras_of(self, token_count: int) -> bytes | None:
        """Of the first tokens. None: nothing names them."""
        return self.extras


def prefix_key(namespace: bytes, prefix: Prefix, token_count: int) -> bytes | None:
    """`keys.chunk_key` of the first `token_count` tokens as one chunk; None if nothing names them.
    Off the GIL but for turning tokens into bytes."""
    extras = prefix.extras_of(token_count)
    if extras is None:
        return None
    tokens = array("I", prefix.tokens[:token_count]).tobytes()
    return _native.chain_keys(namespace, ROOT_PARENT, tokens, token_count, [extras])


class Producer:
    """See the module. `port`: where the listener listens."""

    def __init__(
        self, settings: Settings, clock: Clock, metrics: Metrics, identity: Identity, port: int
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._identity = identity
        self._port = port
        self._held_blocks: dict[str, int] = {}
        self._plan = ProducerPlan()
        self._appointed: dict[str, Begin] = {}  # that run
        self._met: OrderedDict[bytes, None] = OrderedDict()  # transfers of appointments

    @property
    def held_block_count(self) -> int:
        return sum(self._held_blocks.values())

    def finished(
        self, request_id: str, params: Any, prefix: Prefix, tables: Tables
    ) -> dict[str, Any] | None:
        """A request has finished. If its client asked for it and there is room, its blocks must be
        kept until `ended` says so, and this is what the client gets; else None."""
        if not wants_remote_decode(params) or not prefix.tokens or not self._settings.secret:
            return None
        begin = self._appointed.get(request_id) or self._begin(request_id, prefix, self._id())
        if begin is None:
            self._metrics.count("kvferry_transfer_leases_total", outcome="unnamed")
            return None
        block_count = sum(1 for table in tables for block in table if block >= 0)
        if self.held_block_count + block_count > self._settings.leased_blocks_max:
            self._metrics.count("kvferry_transfer_leases_total", outcome="no_room")
            self.cancel(request_id)
            return None
        self._appointed.pop(request_id, None)
        hold = Hold(
            request_id, begin.transfer, begin.generation, begin.token_count, tables, begin.key
        )
        self._add(holds=hold)
        self._held_blocks[request_id] = block_count
        self._metrics.count("kvferry_transfer_leases_total", outcome="granted")
        self._metrics.set("kvferry_transfer_blocks_leased", self.held_block_count)
        return mint(self._settings.secret, self._offer(begin))

    def appointed(self, request_id: str, params: Any, prefix: Prefix) -> bool:
        """A request that is about to run; `prefix`: its whole prompt, which something names. True:
        a reader may come for it, and `progress`, `withdraw` are wanted until `finished` or
        `cancel`."""
        met, _ = read_appointment(self._settings.secret, params)
        is_for_us = met is not None and (met.boot, met.namespace) == (
            self._identity.boot,
            self._identity.namespace,
        )
        if not is_for_us or self._settings.direction != "push" or met.transfer in self._met:
            return False
        begin = self._begin(request_id, prefix, met.transfer)
        if begin is None:
            return False
        self._met[met.transfer] = None
        while len(self._met) > REMEMBERED_MAX:
            self._met.popitem(last=False)
        self._appointed[request_id] = begin
        self._add(begins=begin)
        return True

    def progress(self, request_id: str, computed_tokens: int, tables: Tables) -> None:
        """What the step that is being planned makes final. See `halves.Progress`."""
        begin = self._appointed.get(request_id)
        if begin is not None:
            count = min(computed_tokens, begin.token_count)
            self._add(progress=Progress(request_id, count, tables))

    def withdraw(self, request_id: str) -> None:
        """The step that is being planned may overwrite its blocks: it was preempted."""
        if request_id in self._appointed:
            self._add(withdrawn=request_id)

    def cancel(self, request_id: str) -> None:
        """It ends, and its blocks are not kept. Idempotent."""
        if self._appointed.pop(request_id, None) is not None:
            self._add(cancelled=request_id)

    def plan(self) -> ProducerPlan:
        """What ranks must know since the last step."""
        plan, self._plan = self._plan, ProducerPlan()
        return plan

    @property
    def has_news(self) -> bool:
        """True: a step is needed even if no request computes, or readers wait in vain."""
        return self._plan != ProducerPlan()

    def ended(self, request_ids: Sequence[str]) -> None:
        """All ranks have said that these leases are over. Others' requests are ignored."""
        for request_id in request_ids:
            self._held_blocks.pop(request_id, None)
        self._metrics.set("kvferry_transfer_blocks_leased", self.held_block_count)

    def rename(self, namespace: bytes) -> None:
        """The engine is another one now (its weights have changed): what it offers from now on is
        for those of that name. What it has offered stays what it was."""
        self._identity = replace(self._identity, namespace=namespace)

    def may_reset(self) -> bool:
        """Whether the cache may be reset, the weights changed, the engine put to sleep: not while
        somebody may read. A lease that was granted is not taken back; it ends by itself."""
        return not (self._held_blocks or self._appointed)

    def _id(self) -> bytes:
        return self._clock.random_bytes(ID_BYTES)

    def _begin(self, request_id: str, prefix: Prefix, transfer: bytes) -> Begin | None:
        """None: nothing names these tokens."""
        key = prefix_key(self._identity.namespace, prefix, len(prefix.tokens))
        if key is None:
            return None
        return Begin(request_id, transfer, self._id(), len(prefix.tokens), key)

    def _offer(self, begin: Begin) -> Offer:
        return Offer(
            begin.transfer,
            self._identity.boot,
            self._settings.advertise_host,
            self._port,
            self._identity.namespace,
            begin.key,
            begin.token_count,
        )

    def _add(self, **news: Any) -> None:
        """To the plan of the next step, by its field."""
        ((name, item),) = news.items()
        self._plan = msgspec.structs.replace(
            self._plan, **{name: (*getattr(self._plan, name), item)}
        )
