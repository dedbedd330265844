"""Catalogs that misbehave: a wrapper with seeded faults, and one catalog for many processes that
can be lost or come back as it was.

A catalog is a hint, so all of this may cost hits and nothing else.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from kvferry.catalog.base import Catalog
from kvferry.catalog.memory import MemoryCatalog
from kvferry.clock import Clock
from kvferry.errors import UnavailableError
from kvferry.testing.clock import Chance


class CatalogFault(Enum):
    """What can go wrong with one call."""

    UNAVAILABLE = "unavailable"  # nothing was done
    LATE = "late"  # done, after up to `late_s_max`
    LOST_REPLY = "lost_reply"  # done, but the caller sees a failure
    DUPLICATE = "duplicate"  # done twice
    STALE = "stale"  # lookup: as of an earlier time


REPEATABLE = (
    "attach",
    "lookup",
    "lookup_packed",
    "present",
    "touch",
    "commit",
    "abort",
    "evict",
    "grown",
)
"""Verbs that may arrive twice: what a transport that retries would do."""


class SharedCatalog:
    """The one catalog of a world, as all processes see it. `make` opens a new, empty one."""

    def __init__(self, make: Callable[[], MemoryCatalog]):
        self._make = make
        self._inner = make()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def lose(self) -> None:
        self._inner = self._make()

    def save(self) -> dict[str, Any]:
        """Everything that it knows, to be restored later."""
        book = vars(self._inner._book)
        return {name: copy.deepcopy(value) for name, value in book.items() if name != "_clock"}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """It is as it was, and does not know it."""
        vars(self._inner._book).update(copy.deepcopy(dict(saved)))


class FaultyCatalog:
    """A `Catalog` around one that others use as well. `rates`: chance of each fault, per call.
    `fired` counts. With `rates` emptied no fault begins."""

    def __init__(
        self,
        inner: Catalog,
        clock: Clock,
        chance: Chance,
        rates: Mapping[CatalogFault, float],
        late_s_max: float = 0.05,
    ):
        self.inner = inner
        self.rates = dict(rates)
        self.fired: Counter[CatalogFault] = Counter()
        self._clock = clock
        self._chance = chance
        self._late_s_max = late_s_max
        self._answers: dict[tuple[str, bytes, bytes], Any] = {}

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            return self._call(verb, arguments)

        return call

    def _call(self, verb: str, arguments: Sequence[Any]) -> Any:
        if self._fires(CatalogFault.UNAVAILABLE):
            raise UnavailableError("test.unavailable", f"{verb}: the catalog is down")
        if self._fires(CatalogFault.LATE):
            self._clock.sleep(self._chance.uniform(0, self._late_s_max))
        answer = self._answer(verb, arguments)
        if verb in REPEATABLE and self._fires(CatalogFault.DUPLICATE):
            answer = self._answer(verb, arguments)
        if self._fires(CatalogFault.LOST_REPLY):
            raise UnavailableError("test.lost_reply", f"{verb}: the connection broke")
        return answer

    def _answer(self, verb: str, arguments: Sequence[Any]) -> Any:
        if not verb.startswith("lookup"):
            return getattr(self.inner, verb)(*arguments)
        namespace, keys = arguments
        name = (verb, namespace, b"".join(keys))
        if name in self._answers and self._fires(CatalogFault.STALE):
            return self._answers[name]
        answer = getattr(self.inner, verb)(*arguments)
        self._answers.setdefault(name, answer)
        return answer

    def _fires(self, fault: CatalogFault) -> bool:
        fires = self._chance.random() < self.rates.get(fault, 0.0)
        self.fired[fault] += fires
        return fires
