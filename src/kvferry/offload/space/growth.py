"""Adds segments to the store, without holding up what waits for the catalog.

The catalog numbers and counts segments, on the runner's thread. Their files are made by `files`, a
runner of its own: on a disk that takes a millisecond, but in memory or on a network's file system
it takes as long as writing them, and lookups would stand in line behind it.
"""

import logging
from functools import partial

from kvferry.catalog.base import Catalog, Refused
from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.errors import ExhaustedError, InternalError
from kvferry.metrics import Metrics
from kvferry.offload.base import Part
from kvferry.pages.base import PageStore

log = logging.getLogger(__name__)

PATIENCE_S = 0.02
"""How long a new segment is waited for."""
MAKE_S = 60.0
MAKING_MAX = 8
POLL_S = 0.001
FULL_S = 10.0
"""After the disk had no room for a segment none is tried for so long: where a file's space is
allocated by writing it, to find out takes as long as making one. Old pages give way meanwhile."""


class Growth:
    """Runner's thread. `patience_s`: as `PATIENCE_S`, where `files` has a thread. `full_s`: as
    `FULL_S`."""

    def __init__(
        self,
        catalog: Catalog,
        pages: PageStore,
        files: Runner,
        clock: Clock,
        metrics: Metrics,
        patience_s: float,
        full_s: float = FULL_S,
    ):
        self._catalog = catalog
        self._pages = pages
        self._files = files
        self._clock = clock
        self._metrics = metrics
        self._patience_s = patience_s
        self._full_s = full_s
        self._making: dict[int, tuple[bytes, Ticket]] = {}
        self._full_until_s = 0.0

    @property
    def is_full(self) -> bool:
        """Not for want of budget: none can be made."""
        return self._clock.now_s() < self._full_until_s

    def freed(self) -> None:
        """A segment was deleted: there is room for another one."""
        self._full_until_s = 0.0

    def is_making(self, namespace: bytes) -> bool:
        """A segment of this namespace is on its way."""
        return any(of == namespace for of, _ in self._making.values())

    def add(self, part: Part, tenant: bytes) -> bool:
        """Whether there is one more segment now. It may come later, or there is no room for one:
        the budget, the tenant's quota or the disk does not have it."""
        if self.is_full or len(self._making) >= MAKING_MAX:
            return False
        segment = self._catalog.grow(part.namespace, tenant)
        if isinstance(segment, Refused):
            if segment is Refused.QUOTA:
                self._metrics.count("kvferry_quota_refusals_total")
            return False
        make = partial(self._pages.create_segment, segment, part.namespace, part.geometry)
        ticket = self._files.submit(make, MAKE_S, lambda _: self._pages.delete_segment(segment))
        self._making[segment] = part.namespace, ticket
        give_up_s = self._clock.now_s() + self._patience_s
        while self._is_pending(ticket) and self._clock.now_s() < give_up_s:
            self._clock.sleep(POLL_S)
        return self._settle(segment)

    def settle(self) -> None:
        """Takes the segments that were made meanwhile."""
        for segment in list(self._making):
            self._settle(segment)

    def _is_pending(self, ticket: Ticket) -> bool:
        return ticket.state(self._clock.now_s()) is TicketState.PENDING

    def _settle(self, segment: int) -> bool:
        """Whether the segment can be used from now on. One that is late, or broke in the making,
        the catalog gives to a later sweep, as if its maker had died."""
        _, ticket = self._making[segment]
        state = ticket.state(self._clock.now_s())
        if state is TicketState.PENDING:
            return False
        del self._making[segment]
        if state is TicketState.DONE:
            if self._catalog.grown(segment):
                self._metrics.count("kvferry_segments_created_total")
                return True
            self._pages.delete_segment(segment)  # took too long: somebody was told to delete it
        elif state is TicketState.REFUSED:
            self._catalog.shrunk(segment)
        elif isinstance(ticket.error, InternalError):
            raise ticket.error
        elif ticket.error is not None:
            self._fail(segment, ticket.error)
        return False

    def _fail(self, segment: int, error: Exception) -> None:
        """What is wrong with the disk is no failure of the catalog's, whose runner this is."""
        is_full = isinstance(error, ExhaustedError)  # before the budget is
        self._full_until_s = self._clock.now_s() + self._full_s
        reason = "no_space" if is_full else "io_error"
        self._metrics.count("kvferry_store_drops_total", reason=reason)
        if is_full:
            self._catalog.shrunk(segment)
        else:
            log.warning("a segment cannot be made: %s", error)
