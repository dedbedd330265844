"""How fast the store can be read, learned before a request depends on it.

Otherwise the first load over a slow store would teach it, and somebody would wait for that load. A
trial reads some pages that are there, whosever they are, into staging, and drops them.
"""

import itertools
from collections.abc import Sequence

from kvferry.catalog.runner import Runner, Ticket, TicketState
from kvferry.clock import Clock
from kvferry.device.staging import Staging
from kvferry.offload.worker.ranks import RankPart
from kvferry.pages.base import Extent, FoundPage, Outcome, PageStore, Result

TRIAL_BYTES = 64 << 20
FIND_S = 1.0
"""Pages are looked for no longer than this: what the runner should commit waits meanwhile."""


class Trial:
    """One at a time. Mover's thread, except `ask` and `take`: any.

    Each rank reads its own slices, of the part that has the most bytes; the time is scaled to all
    `parts`. What fails is not a word about speed: a trial with such a read ends without a result.
    """

    def __init__(
        self,
        pages: PageStore,
        staging: Staging,
        runner: Runner,
        clock: Clock,
        parts: Sequence[RankPart],
    ):
        self._pages = pages
        self._staging = staging
        self._runner = runner
        self._clock = clock
        self._part = max(parts, key=_bytes_per_token)
        self._scale = sum(map(_bytes_per_token, parts)) / _bytes_per_token(self._part)
        wanted_count = max(1, TRIAL_BYTES // self._part.extent_bytes)
        self._page_count = min(wanted_count, staging.slot_count // 4)
        self._is_wanted = True
        self._search: Ticket | None = None
        self._slots: dict[int, int] = {}
        self._job = 0
        self._read_count = 0
        self._has_failed = False
        self._started_s = 0.0
        self._result = (0, 0.0)

    def ask(self) -> None:
        """For a trial as soon as there are pages to read. Any thread."""
        self._is_wanted = True

    def take(self) -> tuple[int, float]:
        """Tokens that were read since the last call, and how many seconds that took. Any thread."""
        result, self._result = self._result, (0, 0.0)
        return result

    @property
    def pending_count(self) -> int:
        """Reads that are out."""
        return len(self._slots)

    def advance(self) -> None:
        """Begins what is due."""
        if self._search is None:
            if self._is_wanted and self._page_count and not self._slots:
                self._is_wanted = False
                self._search = self._runner.submit(self._find, FIND_S)
            return
        state = self._search.state(self._clock.now_s())
        if state is TicketState.PENDING:
            return
        found = self._search.value if state is TicketState.DONE else None
        self._search = None
        if found:
            self._begin(found)

    def read(self, results: Sequence[Result]) -> list[Result]:
        """Takes those of the trial; returns the others."""
        if not self._slots:
            return list(results)
        mine = [result for result in results if result.job == self._job]
        for result in mine:
            self._staging.give_back(self._slots.pop(result.index))
            self._read_count += 1
            self._has_failed = self._has_failed or result.outcome is not Outcome.OK
        if mine and not self._slots:
            self._end()
        return [result for result in results if result.job != self._job]

    def _find(self) -> list[FoundPage]:
        """On the runner's thread: headers are read one by one. From a segment that chance picks:
        what was read for the last trial may still be in a cache, and would be too fast."""
        give_up_s = self._clock.now_s() + FIND_S / 2
        found: list[FoundPage] = []
        segments = self._pages.segments()
        first = int.from_bytes(self._clock.random_bytes(4), "big") % max(1, len(segments))
        for facts in segments[first:] + segments[:first]:
            if len(found) >= self._page_count or self._clock.now_s() >= give_up_s:
                break
            if facts.geometry == self._part.geometry:
                left_count = self._page_count - len(found)
                found += itertools.islice(self._pages.scan(facts.segment), left_count)
        return found

    def _begin(self, found: Sequence[FoundPage]) -> None:
        extents = []
        for page in found:
            address = self._staging.take_for_store()
            if address is not None:
                extents.append(self._extent(page, address))
        if not extents:
            return
        self._read_count, self._has_failed = 0, False
        self._started_s = self._clock.now_s()
        self._job = self._pages.submit_reads(extents)
        self._slots = {index: extent.buffer_address for index, extent in enumerate(extents)}

    def _extent(self, found: FoundPage, staging_address: int) -> Extent:
        placement = self._part.local.placement
        return Extent(
            found.page,
            self._part.geometry,
            found.address,
            placement.first_slice,
            placement.slice_count,
            staging_address,
            verify_payload=not self._part.copier.proves_pages,
        )

    def _end(self) -> None:
        if self._has_failed:
            return
        tokens = self._read_count * self._part.local.part.chunk_tokens
        duration_s = (self._clock.now_s() - self._started_s) * self._scale
        self._result = (tokens, duration_s)


def _bytes_per_token(part: RankPart) -> float:
    return part.extent_bytes / part.local.part.chunk_tokens
