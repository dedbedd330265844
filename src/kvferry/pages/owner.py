"""Which catalog hands out the slots of a store: one at a time, taken over when it falls silent.

    owner.<8 hex>   one file for each term of ownership; the highest number counts

A term begins by creating its file, which only one can. It holds the catalog's id, where it is,
and a count for every process that uses it. All processes of one catalog beat in one term; its
counts move as long as one of them lives. Another catalog watches them by its own clock, for a
lease: if they move it is refused, if they don't it begins the next term. Nobody writes to a term
that is not its own, so an owner that was only asleep sees by the next beat that it has lost.
The count of a process that was killed stands still; the others drop it after a lease.
"""

import re
import socket
from pathlib import Path

import msgspec

from kvferry.clock import Clock
from kvferry.errors import ClosedError, IncompatibleError
from kvferry.pages import files

_TERM = re.compile(r"owner\.([0-9a-f]{8})")
_VERSION = 1  # 1: the first
_LOOKS_PER_LEASE = 10
_PROCESSES_MAX = 64
OWNER_LEASE_S = 10.0
"""An owner, or an engine, that was not heard of for so long is gone."""


class Term(msgspec.Struct, frozen=True):
    """What the file of a term says. `beats`: count by process; empty: all have released it."""

    version: int
    catalog_id: str
    host: str
    beats: dict[str, int]


_NOBODY = Term(_VERSION, "", "", {})


class StoreOwnership:
    """One process's part in the ownership of a store. One thread owns it; it blocks on files and,
    in `acquire`, for up to a lease.

    Life: `acquire`, then `beat` at least four times in a lease; slots may be handed out only while
    `holds`. `lost` is for good: another catalog owns the store. All parties name one `lease_s`.
    Raises as `files.system_errors` says.
    """

    def __init__(self, root: Path, catalog_id: str, clock: Clock):
        self._root = root
        self._catalog_id = catalog_id
        self._clock = clock
        self._process = ""
        self._number: int | None = None
        self._lease_s = 0.0
        self._beat_s = 0.0
        self._count = 0
        self._moved: dict[str, tuple[int, float]] = {}  # count by process, and since when
        self.lost = False

    @property
    def holds(self) -> bool:
        """Whether slots may be handed out now: owned, and not silent for a lease."""
        silent_s = self._clock.now_s() - self._beat_s
        return self._number is not None and not self.lost and silent_s < self._lease_s

    def acquire(self, lease_s: float) -> bool:
        """Returns at once if this catalog owns the store, or nobody does; else watches the owner
        for `lease_s`. True if the catalog must be rebuilt from the pages, because it was not the
        last to own the store. IncompatibleError if another catalog is alive."""
        self._process = self._clock.random_bytes(8).hex()
        self._lease_s = lease_s
        with files.system_errors("own", self._root):
            while True:
                number, term = self._latest()
                if term.catalog_id == self._catalog_id:
                    self._begin(number)
                    return False
                if term.beats:
                    self._watch(number, term)
                if self._create(number + 1):
                    self._begin(number + 1)
                    return True

    def beat(self) -> None:
        """Says that this catalog is alive, and finds out whether it has been replaced."""
        if self._number is None:
            raise ClosedError("pages.owner", "beat without ownership")
        with files.system_errors("own", self._root):
            number, term = self._latest()
            if number != self._number or term.catalog_id != self._catalog_id:
                self.lost = True
                return
            self._count += 1
            self._write(term, {**self._living(term), self._process: self._count})
            self._beat_s = self._clock.now_s()

    def release(self) -> None:
        """Ends this process's part. When the last one leaves, another catalog may have the store
        at once. Idempotent."""
        if self._number is None:
            return
        with files.system_errors("own", self._root):
            number, term = self._latest()
            if number == self._number:
                self._write(term, _others(term, self._process))
        self._number = None

    def user(self, lease_s: float) -> Term | None:
        """The term that some process uses; None if all have left. Where some may have died it
        watches, for `lease_s` at most. Looks only; may be called without `acquire`."""
        with files.system_errors("look at", self._root):
            number, term = self._latest()
            for _ in range(_LOOKS_PER_LEASE):
                if not term.beats:
                    return None
                self._clock.sleep(lease_s / _LOOKS_PER_LEASE)
                seen, (latest_number, term) = term, self._latest()
                if latest_number != number or term.beats.items() - seen.beats.items():
                    return term
        return None

    def term(self) -> Term:
        """The latest. Looks only; may be called without `acquire`."""
        with files.system_errors("look at", self._root):
            return self._latest()[1]

    def _begin(self, number: int) -> None:
        self._number = number
        self.lost = False
        self.beat()
        for older in self._numbers():
            if older < number:
                self._path(older).unlink(missing_ok=True)

    def _living(self, term: Term) -> dict[str, int]:
        """The counts of other processes that have moved within a lease."""
        now_s, others = self._clock.now_s(), _others(term, self._process)
        known = self._moved
        self._moved = {
            name: known[name] if known.get(name, (None, 0.0))[0] == count else (count, now_s)
            for name, count in others.items()
        }
        return {
            name: count
            for name, (count, since_s) in self._moved.items()
            if now_s - since_s < self._lease_s
        }

    def _watch(self, number: int, seen: Term) -> None:
        for _ in range(_LOOKS_PER_LEASE):
            self._clock.sleep(self._lease_s / _LOOKS_PER_LEASE)
            latest_number, term = self._latest()
            if (latest_number, term) == (number, seen):
                continue
            if not term.beats or term.catalog_id == self._catalog_id:
                return
            raise IncompatibleError(
                "pages.owned",
                f"the store {self._root} is in use by another catalog, on host {term.host}: use "
                f"the same catalog, or stop the engines there and wait {self._lease_s:.0f} s",
                owner=term.catalog_id,
                catalog=self._catalog_id,
            )

    def _create(self, number: int) -> bool:
        term = Term(_VERSION, self._catalog_id, socket.gethostname(), {self._process: 0})
        return files.create_file(self._path(number), msgspec.json.encode(term), self._clock)

    def _write(self, term: Term, beats: dict[str, int]) -> None:
        content = msgspec.json.encode(msgspec.structs.replace(term, beats=beats))
        files.replace_file(self._path(self._number), content, self._clock)

    def _latest(self) -> tuple[int, Term]:
        while True:
            number = max(self._numbers(), default=0)
            if number == 0:
                return 0, _NOBODY
            try:
                return number, msgspec.json.decode(self._path(number).read_bytes(), type=Term)
            except FileNotFoundError:
                continue
            except msgspec.DecodeError:
                return number, _NOBODY

    def _numbers(self) -> list[int]:
        names = (_TERM.fullmatch(path.name) for path in self._root.iterdir())
        return [int(name[1], 16) for name in names if name]

    def _path(self, number: int) -> Path:
        return self._root / f"owner.{number:08x}"


class Census:
    """Counts the processes that use a store, by their beats. Looks only. One thread; it has to ask
    at least twice in a lease. Raises as `files.system_errors` says."""

    def __init__(self, root: Path, clock: Clock, lease_s: float = OWNER_LEASE_S):
        self._owner = StoreOwnership(root, "", clock)
        self._clock = clock
        self._lease_s = lease_s
        self._first_s: float | None = None
        self._seen: dict[str, tuple[int, float | None]] = {}  # count, and when it moved

    def count(self) -> int | None:
        """None: it is not known yet of all whether they live."""
        beats, now_s = self._owner.term().beats, self._clock.now_s()
        is_first = self._first_s is None
        self._first_s = now_s if is_first else self._first_s
        seen, self._seen = self._seen, {}
        for process, count in beats.items():
            before, moved_s = seen.get(process, (None, None))
            self._seen[process] = count, (moved_s if count == before or is_first else now_s)
        moments = [moved_s for _, moved_s in self._seen.values()]
        if None in moments and now_s < self._first_s + self._lease_s:
            return None
        return sum(moved_s is not None and now_s < moved_s + self._lease_s for moved_s in moments)


def _others(term: Term, process: str) -> dict[str, int]:
    """The processes that beat last, without one."""
    others = [(name, count) for name, count in term.beats.items() if name != process]
    return dict(others[-_PROCESSES_MAX:])
