"""What tenants and namespaces may have, in whole segments: the rules, the same in every catalog.

1. Who is at its maximum gets no further segment: its own coldest pages go. Who is above it (the
   maximum was lowered) gives up its coldest segments.
2. A segment with pages goes to another only while all whose it is stay at or above what they are
   guaranteed. So who floods the store pushes nobody below that.
3. What is guaranteed and not used, others may use. Who wants room below its guarantee takes it from
   others before its own pages go; and while it wants (a minute after each sweep), nobody who has
   got its own guarantee grows into what it is still to get.

4. Where there are quotas, a share wants room for a quarter of what it could have at most: engines
   hold slots ready by the capacity, and that would push out all that a small tenant has stored.

Both owners of a share count: its namespace and its tenant. Who has no quota is guaranteed nothing
and has no maximum.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvferry.catalog.base import EVERYBODY, NO_MAXIMUM, Quota, Refused, Share

WANTED_PART = 4


class QuotaRow(NamedTuple):
    """One owner's `base.Quota`; and until when others keep out of what is missing to it."""

    guaranteed_count: int = 0
    maximum_count: int = NO_MAXIMUM
    ttl_s: float = 0.0
    claimed_until_s: float = 0.0


def renewed(rows: Mapping[bytes, QuotaRow], quotas: Sequence[Quota]) -> dict[bytes, QuotaRow]:
    """The rows of these quotas, in place of those before; claims stand."""
    return {
        owner: QuotaRow(*given, rows.get(owner, QuotaRow()).claimed_until_s)
        for owner, *given in quotas
    }


def ttl_s(rows: Mapping[bytes, QuotaRow], share: Share) -> float:
    """The shortest time to live that its owners or the store say; infinite: none does."""
    said = (rows[owner].ttl_s for owner in (*share, EVERYBODY) if owner in rows)
    return min(filter(None, said), default=math.inf)


class Ledger:
    """How many segments there are in all, and of whom, while one call changes that.

    `room_max`: how many the budget holds.
    """

    def __init__(self, rows: Mapping[bytes, QuotaRow], room_max: int, now_s: float):
        self.room_max = room_max
        self.total = 0
        self._rows = dict(rows)
        self._now_s = now_s
        self._held: Counter[bytes] = Counter()

    def add(self, share: Share, by: int = 1) -> None:
        self.total += by
        for owner in self._owners(share):
            self._held[owner] += by

    def claim(self, owner: bytes, until_s: float) -> None:
        self._rows[owner] = self._rows[owner]._replace(claimed_until_s=until_s)

    def refusal(self, share: Share) -> Refused | None:
        """Why a share gets no further segment; None: it does."""
        if self.total >= self.room_max:
            return Refused.BUDGET
        return None if self.spare(share) else Refused.QUOTA

    def spare(self, share: Share) -> int:
        """How many segments a share may get as things are."""
        spare = self.room_max - self.total
        owners = self._owners(share)
        if not self.below(share):
            spare -= sum(self._claimed(owner) for owner in self._rows if owner not in owners)
        for owner in owners:
            spare = min(spare, self._rows[owner].maximum_count - self._held[owner])
        return max(0, spare)

    def slots_max(self, share: Share, slot_count: int) -> int:
        """For how many slots a share may want room. `slot_count`: in a segment."""
        if not self._rows:
            return sys.maxsize
        owners = self._owners(share)
        kept = sum(
            min(self._held[o], r.guaranteed_count) for o, r in self._rows.items() if o not in owners
        )
        tops = (self._rows[owner].maximum_count for owner in owners)
        return max(1, max(1, min([self.room_max - kept, *tops])) * slot_count // WANTED_PART)

    def may_give(self, source: Share, share: Share) -> bool:
        """Whether `source` may lose a segment with pages to `share`, and that is of use."""
        return self.may_lose(source, share) and self.gains(share, source)

    def gains(self, share: Share, source: Share) -> bool:
        """Whether a share that may not grow may do so when `source` has one segment less."""
        self.add(source, -1)
        spare = self.spare(share)
        self.add(source)
        return spare > 0

    def below(self, share: Share) -> list[bytes]:
        """Owners of a share that have less than they are guaranteed."""
        return [o for o in self._owners(share) if self._held[o] < self._rows[o].guaranteed_count]

    def is_bound(self, share: Share) -> bool:
        """Whether it is for a quota if pages are evicted for a share that may not grow."""
        owners = self._owners(share)
        is_full = any(self._held[o] >= self._rows[o].maximum_count for o in owners)
        return is_full or self.total < self.room_max or bool(self.below(share))

    def may_lose(self, share: Share, to: Share | None = None) -> bool:
        """Whether the guarantees let a share lose a segment; `to`: whose owners lose nothing."""
        return all(
            self._held[owner] > self._rows[owner].guaranteed_count
            for owner in self._owners(share)
            if to is None or owner not in to
        )

    def above(self) -> list[bytes]:
        """Owners that have more than their maximum."""
        return [o for o, row in sorted(self._rows.items()) if self._held[o] > row.maximum_count]

    def _owners(self, share: Share) -> list[bytes]:
        """Those that have a quota."""
        return [owner for owner in share if owner in self._rows]

    def _claimed(self, owner: bytes) -> int:
        row = self._rows[owner]
        is_claimed = row.claimed_until_s > self._now_s
        return max(0, row.guaranteed_count - self._held[owner]) if is_claimed else 0
