"""One store over several roots: each segment lies, whole, on the root that had most room.

The first root is the store's home: it has the superblock that decides and the owner's word, and
must open. Any other may be out: it did not open, its I/O fails again and again, or nothing comes
back from it. Operations on a root that is out end at once as IO_ERROR, never ABSENT, which would
have the page evicted for engines that can still read it; new segments go to other roots. A root
that failed is tried again after a while (`OUT_S`); one that did not open stays out until the
process ends.

What this cannot help against is a root whose file system holds up `stat` or `open` themselves: the
one thread that submits waits in it, and the engine computes everything itself meanwhile.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.clock import Clock
from kvferry.errors import ClosedError, Error, ExhaustedError, UnavailableError
from kvferry.layout import PageGeometry
from kvferry.pages.base import (
    Extent,
    FoundPage,
    Outcome,
    Overdue,
    PageStore,
    Result,
    SegmentFacts,
    StoreFacts,
)

log = logging.getLogger(__name__)

FAILURES_MAX = 8
"""After so many failed operations in a row a root is out."""
HANG_S = 5.0
"""A root from which nothing has come back for so long, while something is out, is out as well."""
OUT_S, OUT_MAX_S = 30.0, 600.0
"""For how long it is out then: longer each time, until an operation succeeds."""
TURN_S = 0.0005
"""How long one root is waited for while others are busy too."""


class Root(PageStore, Protocol):
    """What a page store must know besides to be one of several. Any thread."""

    def available_bytes(self) -> int:
        """What its medium still has room for."""


@dataclass(eq=False)
class _Share:
    """What of one of the caller's batches went to a root: the caller's job and indices there."""

    job: int
    indices: list[int]
    segments: list[int]
    left_count: int


@dataclass(eq=False)
class _Place:
    """One root. `shares`: by its own job number."""

    name: str
    store: Root
    shares: dict[int, _Share] = field(default_factory=dict)
    failure_count: int = 0
    heard_s: float = 0.0
    out_s: float = OUT_S
    out_until_s: float = -math.inf

    def is_out(self, now_s: float) -> bool:
        hangs = bool(self.shares) and now_s - self.heard_s > HANG_S
        return hangs or now_s < self.out_until_s

    def begin(self, number: int, share: _Share, now_s: float) -> None:
        if not self.shares:
            self.heard_s = now_s
        self.shares[number] = share

    def end(self, result: Result, now_s: float) -> Result:
        """The same result as the caller knows it."""
        share = self.shares[result.job]
        share.left_count -= 1
        if share.left_count == 0:
            del self.shares[result.job]
        self.heard_s = now_s
        self.failure_count = self.failure_count + 1 if result.outcome is Outcome.IO_ERROR else 0
        if self.failure_count == FAILURES_MAX:
            self.put_out(now_s, f"{FAILURES_MAX} operations in a row failed")
        elif result.outcome is Outcome.OK:
            self.out_s = OUT_S
        return replace(result, job=share.job, index=share.indices[result.index])

    def put_out(self, now_s: float, reason: object) -> None:
        log.error("the root %s is out, its pages are misses: %s", self.name, reason)
        self.out_until_s, self.failure_count = now_s + self.out_s, 0
        self.out_s = min(2 * self.out_s, OUT_MAX_S)


class SpreadPages:
    """A `PageStore`. `make_others`: stores over the other roots by name, given what the home says,
    not open. `lost`: names of further roots, which are out for good. Threads as the contract says.
    """

    def __init__(
        self,
        home: tuple[str, Root],
        make_others: Callable[[StoreFacts], Sequence[tuple[str, Root]]],
        clock: Clock,
        lost: Sequence[str] = (),
    ):
        self._home = _Place(*home)
        self._make_others = make_others
        self._clock = clock
        self._places = [self._home]
        self._lost = list(lost)
        self._of: dict[int, _Place] = {}
        self._refused: list[Result] = []
        self._job = 0
        self._facts: StoreFacts | None = None

    def open(self) -> StoreFacts:
        if self._facts is not None:
            return self._facts
        facts = self._home.store.open()
        for name, store in self._make_others(facts):
            try:
                store.open()
            except UnavailableError as error:
                self._lost.append(name)
                log.error("the root %s is out, its pages are misses: %s", name, error)
                continue
            except Error:
                self.close()
                raise
            self._places.append(_Place(name, store))
        self._facts = facts
        return facts

    def close(self) -> None:
        for place in self._places:
            place.store.close()
        self._facts = None

    @property
    def direct_io(self) -> bool:
        """Of all roots."""
        return all(getattr(place.store, "direct_io", False) for place in self._places)

    def names(self) -> list[str]:
        """Of the roots that opened, the home first."""
        return [place.name for place in self._places]

    def out_count(self) -> int:
        """Roots whose pages are misses now."""
        now_s = self._clock.now_s()
        return len(self._lost) + sum(place.is_out(now_s) for place in self._places)

    def allocate(self, length_bytes: int) -> tuple[int, object] | None:
        return None

    def register(self, address: int, length_bytes: int) -> None:
        for place in self._places:
            place.store.register(address, length_bytes)

    def submit_reads(self, extents: Sequence[Extent]) -> int:
        return self._submit(extents, lambda store, mine: store.submit_reads(mine))

    def submit_writes(self, extents: Sequence[Extent]) -> int:
        return self._submit(extents, lambda store, mine: store.submit_writes(mine))

    def leave_room(self, is_wanted: bool) -> None:
        for place in self._places:
            place.store.leave_room(is_wanted)

    def poll(self) -> list[Result]:
        results, self._refused = self._refused, []
        for place in self._places:
            results += self._taken(place, place.store.poll())
        return results

    def wait(self, timeout_s: float) -> list[Result]:
        results = self.poll()
        end_s = self._clock.now_s() + timeout_s
        while not results:
            busy = [place for place in self._places if place.shares]
            left_s = end_s - self._clock.now_s()
            if not busy or left_s <= 0:
                break
            for place in busy:
                turn_s = left_s if len(busy) == 1 else min(left_s, TURN_S)
                results += self._taken(place, place.store.wait(turn_s))
        return results

    def overdue(self) -> Overdue:
        each = [place.store.overdue() for place in self._places]
        now_count = sum(overdue.now_count for overdue in each)
        return Overdue(now_count, sum(overdue.ever_count for overdue in each))

    def create_segment(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        """On the root with most room that takes it."""
        now_s, error = self._clock.now_s(), None
        healthy = [place for place in self._places if not place.is_out(now_s)]
        known = list(self._of.values())
        healthy.sort(
            key=lambda place: (place is self._of.get(segment), _room(place), -known.count(place)),
            reverse=True,
        )
        for place in healthy:
            try:
                place.store.create_segment(segment, namespace, geometry)
            except (ExhaustedError, UnavailableError) as refused:
                log.warning("no segment can be made on the root %s: %s", place.name, refused)
                error = error if isinstance(error, ExhaustedError) else refused
                continue
            self._of[segment] = place
            return
        raise error or UnavailableError("pages.roots", "all roots are out", segment=segment)

    def delete_segment(self, segment: int) -> None:
        """Raises UnavailableError if the segment may be on a root that is out."""
        is_there, now_s = self._find_anew(segment) is not None, self._clock.now_s()
        for place in self._places if is_there else ():
            if not place.is_out(now_s) and _asked_whether(place, segment):
                place.store.delete_segment(segment)

    def has_segment(self, segment: int) -> bool:
        return self._find_anew(segment) is not None

    def segments(self) -> list[SegmentFacts]:
        """Those of roots that are out are not among them. One that is on two roots, its number used
        again while one of them was out, is there twice."""
        found: list[SegmentFacts] = []
        for place in self._places:
            try:
                here = place.store.segments()
            except UnavailableError as error:
                place.put_out(self._clock.now_s(), error)
                continue
            for facts in here:
                self._of.setdefault(facts.segment, place)
                found.append(facts)
        return sorted(found, key=lambda facts: facts.segment)

    def scan(self, segment: int) -> Iterator[FoundPage]:
        place = self._find(segment)
        return place.store.scan(segment) if place is not None else iter(())

    def used_bytes(self) -> int:
        """Of roots that can be asked."""
        return sum(filter(None, (_asked(place.store.used_bytes) for place in self._places)))

    def _submit(
        self, extents: Sequence[Extent], submit: Callable[[Root, list[Extent]], int]
    ) -> int:
        if self._facts is None:
            raise ClosedError("pages.closed", f"the page store {self._home.name} is not open")
        self._job += 1
        now_s = self._clock.now_s()
        shares: dict[_Place, list[int]] = {}
        for index, extent in enumerate(extents):
            found = self._usable(extent.address.segment, now_s)
            if isinstance(found, Outcome):
                self._refused.append(Result(self._job, index, found))
            else:
                shares.setdefault(found, []).append(index)
        for place, indices in shares.items():
            number = submit(place.store, [extents[index] for index in indices])
            segments = [extents[index].address.segment for index in indices]
            place.begin(number, _Share(self._job, indices, segments, len(indices)), now_s)
        return self._job

    def _usable(self, segment: int, now_s: float) -> _Place | Outcome:
        try:
            place = self._find(segment)
        except UnavailableError:
            return Outcome.IO_ERROR
        if place is None:
            return Outcome.ABSENT
        return Outcome.IO_ERROR if place.is_out(now_s) else place

    def _taken(self, place: _Place, results: list[Result]) -> list[Result]:
        now_s = self._clock.now_s()
        for result in results:
            if result.outcome is Outcome.ABSENT:  # looked for anew, should it be elsewhere now
                self._of.pop(place.shares[result.job].segments[result.index], None)
        return [place.end(result, now_s) for result in results]

    def _find_anew(self, segment: int) -> _Place | None:
        self._of.pop(segment, None)
        return self._find(segment)

    def _find(self, segment: int) -> _Place | None:
        """The root of a segment; None if it is on none. Raises UnavailableError if that cannot be
        known. `_of` is a hint that any thread may write."""
        place = self._of.get(segment)
        if place is not None:
            return place
        now_s = self._clock.now_s()
        is_known = not self._lost
        for place in self._places:
            if place.is_out(now_s):
                is_known = False
                continue
            has_it = _asked_whether(place, segment)
            if has_it:
                self._of[segment] = place
                return place
            is_known = is_known and has_it is not None
        if is_known:
            return None
        raise UnavailableError("pages.roots", f"segment {segment} may be on a root that is out")


def _asked(question: Callable[[], int]) -> int | None:
    """None: the root does not answer."""
    try:
        return question()
    except UnavailableError:
        return None


def _asked_whether(place: _Place, segment: int) -> bool | None:
    return _asked(lambda: place.store.has_segment(segment))


def _room(place: _Place) -> int:
    return _asked(place.store.available_bytes) or 0
