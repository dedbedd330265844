"""Leases: how long a source surely keeps blocks, and how a reader knows without a common clock.

A source measures on its own clock and only ever says durations. A reader counts a duration from
the moment at which it asked, which was before the source spoke, and takes off what two clocks may
drift apart: its end is never later than the source's. A lease is prolonged, never shortened; what
ended never comes back.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.clock import Clock
from kvferry.transfer.messages import Claim, Grant, Release, State, as_tables
from kvferry.transfer.settings import Settings

CLOCK_DRIFT_MAX = 0.01
"""Part of a duration by which two clocks may differ."""
REMEMBERED_MAX = 4096
"""Transfers that ended, and messages that came before their lease."""
UNANSWERED_MAX = 64
"""Claims whose answer would still be taken."""


class HeldUntil:
    """One reader's knowledge of one lease. One thread: the reader's."""

    def __init__(self) -> None:
        self._asked_s: dict[int, float] = {}
        self._until_s = float("-inf")

    def asked(self, serial: int, now_s: float) -> None:
        """A claim is being sent. Serials grow."""
        self._asked_s[serial] = now_s
        if len(self._asked_s) > UNANSWERED_MAX:
            del self._asked_s[min(self._asked_s)]

    def granted(self, serial: int, valid_s: float) -> bool:
        """A grant has come. False if it answers nothing new."""
        asked_s = self._asked_s.get(serial)
        if asked_s is None:
            return False
        self._asked_s = {n: at for n, at in self._asked_s.items() if n > serial}
        self._until_s = max(self._until_s, asked_s + valid_s * (1 - CLOCK_DRIFT_MAX))
        return True

    def is_sure(self, now_s: float) -> bool:
        """Whether the blocks are surely kept until now."""
        return now_s <= self._until_s


@dataclass(slots=True)
class Lease:
    """One request's blocks at one source rank. `end_s`: now; `last_end_s`: the latest that
    renewals can make of it. `told`: until when which reader believes that it has the blocks;
    `released`: readers that are done, by their number in their engine."""

    request_id: str
    transfer: bytes
    generation: bytes
    token_count: int
    tables: tuple[tuple[int, ...], ...]
    end_s: float
    last_end_s: float
    told: dict[str, float] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)


class LeaseBook:
    """All leases of one source rank. One thread at a time.

    A claim or release that comes before its lease waits for it a little: the engine tells its ranks
    with the next step.
    """

    def __init__(self, settings: Settings, clock: Clock):
        self._settings = settings
        self._clock = clock
        self._leases: dict[bytes, Lease] = {}
        self._early: OrderedDict[bytes, list[tuple[float, Claim | Release]]] = OrderedDict()
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._ended: list[tuple[str, str]] = []

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def is_empty(self) -> bool:
        """No lease, and none that ended and was not taken."""
        return not self._leases and not self._ended

    @property
    def oldest_s(self) -> float:
        """Age of the oldest lease, which is the first; 0 if there is none."""
        oldest = next(iter(self._leases.values()), None)
        begun_s = oldest.last_end_s - self._settings.lease_total_s if oldest else 0.0
        return self._clock.now_s() - begun_s if oldest else 0.0

    def begin(
        self,
        request_id: str,
        transfer: bytes,
        generation: bytes,
        token_count: int,
        tables: tuple[tuple[int, ...], ...],
    ) -> list[tuple[Claim, Grant]]:
        """A lease begins. Returns the answers to claims that came before it."""
        now_s = self._clock.now_s()
        self._leases[transfer] = Lease(
            request_id,
            transfer,
            generation,
            token_count,
            as_tables(tables),
            now_s + self._settings.lease_s,
            now_s + self._settings.lease_total_s,
        )
        answers = []
        for _, message in self._early.pop(transfer, []):
            if isinstance(message, Claim):
                answers.append((message, self._answer(message, self._leases.get(transfer))))
            else:
                self.release(message)
        return answers

    def claim(self, claim: Claim) -> Grant | None:
        """Prolongs a lease. None: it may still come, the answer follows."""
        self.end_expired()
        lease = self._leases.get(claim.transfer)
        if lease is None and claim.transfer not in self._over:
            self._remember_early(claim)
            return None
        return self._answer(claim, lease)

    def release(self, release: Release) -> None:
        """A reader is done. The lease ends with the last of its engine, unless somebody else (a
        client may carry one offer to two consumers) was told that he has the blocks."""
        lease = self._leases.get(release.transfer)
        if lease is not None:
            now_s = self._clock.now_s()
            lease.told.pop(release.sender, None)
            lease.released.add(release.reader)
            is_told = any(until_s >= now_s for until_s in lease.told.values())
            if len(lease.released) >= release.reader_count and not is_told:
                self._end(lease, "released")
        elif release.transfer not in self._over:
            self._remember_early(release)

    def expire(self) -> list[tuple[Claim, Grant]]:
        """Ends what is over, and waits no longer for leases that never came: returns the answers to
        those who claimed them."""
        self.end_expired()
        now_s, answers = self._clock.now_s(), []
        for transfer in list(self._early):
            waiting = self._early[transfer]
            if now_s - waiting[0][0] > self._settings.early_s:
                del self._early[transfer]
                answers += [(m, self._answer(m, None)) for _, m in waiting if isinstance(m, Claim)]
        return answers

    def holds(self, transfer: bytes) -> bool:
        """Whether a lease lives, as far as anybody has looked: blocks are given back later."""
        return transfer in self._leases

    def cancel(self, request_id: str) -> bool:
        """A lease ends although nobody is done with it, and nobody is told (`take_ended`). False if
        it was over."""
        found = [lease for lease in self._leases.values() if lease.request_id == request_id]
        for lease in found:
            self._end(lease, "cancelled")
        self._ended = [ended for ended in self._ended if ended[0] != request_id]
        return bool(found)

    def end_expired(self) -> None:
        """Ends what is over."""
        now_s = self._clock.now_s()
        for lease in [lease for lease in self._leases.values() if now_s > lease.end_s]:
            self._end(lease, "expired")

    def take_ended(self) -> list[tuple[str, str]]:
        """Requests whose blocks may be freed, each once, and why: `released`, `expired`."""
        ended, self._ended = self._ended, []
        return ended

    def _answer(self, claim: Claim, lease: Lease | None) -> Grant:
        now_s = self._clock.now_s()
        if lease is None:
            return Grant("", claim.serial, claim.transfer, b"", State.GONE, 0.0, 0)
        prolonged_s = min(now_s + self._settings.lease_s, lease.last_end_s)
        lease.end_s = max(lease.end_s, prolonged_s)
        lease.told[claim.sender] = lease.end_s
        return Grant(
            "",
            claim.serial,
            claim.transfer,
            lease.generation,
            State.HELD,
            lease.end_s - now_s,
            lease.token_count,
            lease.tables if claim.wants_tables else (),
        )

    def _end(self, lease: Lease, reason: str) -> None:
        del self._leases[lease.transfer]
        self._ended.append((lease.request_id, reason))
        self._over[lease.transfer] = None
        while len(self._over) > REMEMBERED_MAX:
            self._over.popitem(last=False)

    def _remember_early(self, message: Claim | Release) -> None:
        while len(self._early) >= REMEMBERED_MAX:
            self._early.popitem(last=False)
        waiting = self._early.setdefault(message.transfer, [])
        if len(waiting) < 64:
            waiting.append((self._clock.now_s(), message))
