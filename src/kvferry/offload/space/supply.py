"""Keeps slots reserved ahead of need, so that a step only takes from what is there.

One thread, the scheduler's, except `tend`; the reservations themselves are made on the runner's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.config import Config
from kvferry.metrics import Metrics
from kvferry.offload.base import SLOT, Part
from kvferry.offload.space.room import Demand, Reserved, Room, SlotPool
from kvferry.pages.base import StoreFacts

RESERVED_AHEAD_MAX = 4096
UNLIMITED_TOKENS = 1 << 62
IDLE_S = 5.0
"""An engine that took no step for this long wants no room: what it wanted last is out of date."""
CHECK_S = 0.2
"""While nothing else says that slots run short, their number is looked at so often."""
PAUSE_S = 0.25
"""After a reservation that got fewer slots than it asked for: the store is full, or the catalog is
down."""
GROWING_PAUSE_S = 0.01
"""The same where segments are being made."""
NOTHING = Reserved(b"", False)


class Refill(NamedTuple):
    """A reservation under way."""

    ticket: Ticket
    count: int
    sure_until_s: float


class Supply:
    """See the module. `may_reserve`: whether the catalog still owns the store's slots.

    `refills`: reservations under way, by part. `is_due`, `check_at_s`: when `refill` has something
    to do.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        metrics: Metrics,
        facts: StoreFacts,
        runner: Runner,
        room: Room,
        may_reserve: Callable[[], bool],
    ):
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._facts = facts
        self._runner = runner
        self._room = room
        self._may_reserve = may_reserve
        self._parts: Sequence[Part] = ()
        self._pools: Sequence[SlotPool] = ()
        self._demands: list[Demand] = []
        self._refill_below: list[float] = []
        self._wanted: dict[bytes, int] = {}
        self._wanted_at_s = 0.0
        self._after_s = 0.0
        self._in_sight_tokens = 0
        self._in_sight_max_tokens = 0
        self.refills: dict[int, Refill] = {}
        self.is_due = False
        self.check_at_s = 0.0

    def use(self, parts: Sequence[Part], pools: Sequence[SlotPool]) -> None:
        """Starts anew with the pools of these parts. The caller has given back the old ones."""
        self._parts, self._pools = parts, pools
        self._wanted = {}
        self._refill_below = [0.0 for _ in parts]
        slots_in_all = self._facts.capacity_bytes // max(self._slot_bytes(part) for part in parts)
        count_max = max(2, min(RESERVED_AHEAD_MAX, slots_in_all // (4 * len(parts))))
        config = self._config
        self._demands = [
            Demand(config.reserve_ahead_count, count_max, config.grace_s) for _ in parts
        ]

    def _slot_bytes(self, part: Part) -> int:
        return part.geometry.slot_bytes(self._facts.alignment_bytes)

    def foresee(self, token_count: int) -> None:
        """So many more tokens than were known may be stored; negative: fewer."""
        self._in_sight_tokens += token_count
        if self._in_sight_tokens > self._in_sight_max_tokens:
            self.is_due = True

    def prepare(self) -> None:
        """A request comes in: a pool that is empty, or would be of no use, is filled at once."""
        now_s = self._clock.now_s()
        for pool in self._pools:
            pool.discard_before(now_s + self._config.store_deadline_s)
        if not all(self._pools):
            self.refill(now_s)

    def watch(self) -> None:
        """After slots were taken."""
        for pool, refill_below in zip(self._pools, self._refill_below, strict=True):
            if len(pool) < refill_below:
                self.is_due = True

    def refill(self, now_s: float) -> None:
        """Asks for slots where they run short."""
        if now_s < self._after_s or not self._may_reserve():
            return
        self.is_due = False
        self.check_at_s = now_s + CHECK_S
        self._in_sight_max_tokens = UNLIMITED_TOKENS
        self._wanted_at_s = now_s
        for index, demand in enumerate(self._demands):
            pool, part = self._pools[index], self._parts[index]
            demand.used(pool.take_used_count(), now_s)
            wanted = demand.wanted_count(now_s, self._in_sight_tokens // part.chunk_tokens)
            pool.discard_before(now_s + self._config.store_deadline_s)
            have = len(pool)
            self._refill_below[index] = wanted / 2
            enough_tokens = self._in_sight_tokens + (2 * have - wanted) * part.chunk_tokens
            self._in_sight_max_tokens = min(self._in_sight_max_tokens, enough_tokens)
            self._give_back(part, pool.take_discarded())
            self._wanted[part.namespace] = wanted
            if index not in self.refills and have * 2 <= wanted:
                self._reserve(index, wanted - have, now_s)
        self._metrics.set("kvferry_slots_reserved_ahead", sum(map(len, self._pools)))

    def _reserve(self, index: int, count: int, now_s: float) -> None:
        part, lease_s = self._parts[index], self._config.reservation_lease_s
        work = functools.partial(self._room.reserve, part, count, lease_s)
        ticket = self._runner.submit(
            work,
            self._config.store_deadline_s,
            lambda late: self._room.give_back(part.namespace, late.packed),
        )
        self.refills[index] = Refill(ticket, count, now_s + lease_s)

    def collect(self, now_s: float) -> bool:
        """Takes what was reserved. True if there are slots that were not there before."""
        has_more = False
        for index, refill in list(self.refills.items()):
            state = refill.ticket.state(now_s)
            if state is TicketState.PENDING:
                continue
            del self.refills[index]
            is_done = state is TicketState.DONE
            packed, is_growing = refill.ticket.value if is_done else NOTHING
            self._pools[index].add(packed, refill.sure_until_s)
            self.is_due = True
            has_more = has_more or bool(packed)
            if len(packed) // SLOT.size < refill.count:
                self._after_s = now_s + (GROWING_PAUSE_S if is_growing else PAUSE_S)
        return has_more

    def give_back(self) -> None:
        """All slots, as far as the runner still gets to it, and those that are on their way."""
        now_s = self._clock.now_s()
        for index, refill in self.refills.items():
            late = refill.ticket.abandon(now_s)
            if late is not None:
                self._give_back(self._parts[index], late.packed)
        self.refills.clear()
        for part, pool in zip(self._parts, self._pools, strict=True):
            self._give_back(part, pool.drain())

    def _give_back(self, part: Part, packed: bytes) -> None:
        if packed:
            work = functools.partial(self._room.give_back, part.namespace, packed)
            self._runner.submit(work, self._config.store_deadline_s)

    def tend(self) -> None:
        """Ends leases and keeps room ahead of need. On the runner's thread, every second."""
        is_idle = self._clock.now_s() - self._wanted_at_s > IDLE_S
        if self._may_reserve():
            self._room.collect([] if is_idle else list(self._wanted.items()))
