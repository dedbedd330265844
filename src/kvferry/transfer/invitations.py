"""Invitations of one consumer rank that is pushed to, and the staging that they name.

As `reads`, with the producer's word in place of the link's: an invitation is open, and its slot the
producer's, until it is answered. What nobody wants any more is stopped, again and again; until the
answer its slot is in *quarantine*. Where nobody can answer, it *rests* for a while, and after a
write that was lost. Late bytes may come all the same: `unload.PageUnloader` sees them. One thread:
the mover's.
"""

from collections import defaultdict
from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.device.staging import Staging
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link, Range
from kvferry.transfer.channel import PushChannel
from kvferry.transfer.messages import (
    Answer,
    Invite,
    Outcome,
    Place,
    Slots,
    Stop,
    seal_message,
)
from kvferry.transfer.reads import ChunkJob
from kvferry.transfer.resting import Resting
from kvferry.transfer.session import Peers
from kvferry.transfer.settings import Settings

REPEAT_S = 0.5
"""After how long an invitation, or its stop, that was not answered is said again."""
PLACES_MAX = 256
"""In one message."""


@dataclass(slots=True, eq=False)
class _Invitation:
    """`is_stopped`: nobody wants it, and that is what was said last. `said_s`: when."""

    chunk: ChunkJob
    place: Place
    is_stopped: bool = False
    said_s: float = float("-inf")


class Invitations:
    """See the module. `staging`: the caller opens, registers and closes it."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        peers: Peers,
        staging: Staging,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._peers = peers
        self._staging = staging
        self._description = b""
        self._count = 0
        self._open: dict[int, _Invitation] = {}
        self._resting = Resting(staging, clock, settings.rest_s)

    def open(self, description: bytes) -> None:
        """`description`: of our end, which opens staging to whoever has it."""
        self._description = description

    @property
    def memory(self) -> Range:
        return Range(self._staging.address, self._staging.length_bytes)

    @property
    def out_count(self) -> int:
        return len(self._open)

    @property
    def invited(self) -> set[str]:
        """Ends of those who have not answered; "" for who cannot be reached."""
        return {invitation.chunk.session.name for invitation in self._open.values()}

    @property
    def given_up_count(self) -> int:
        """Open ones that nobody waits for. Any thread."""
        return sum(not invitation.chunk.is_wanted for invitation in list(self._open.values()))

    @property
    def quarantine_bytes(self) -> int:
        return (self.given_up_count + len(self._resting)) * self._staging.slot_bytes

    @property
    def is_full(self) -> bool:
        return self.quarantine_bytes > self._settings.quarantine_bytes_max

    def post(self, chunk: ChunkJob) -> bool:
        """Invites a chunk's page, with the next `step`. False if no slot is free."""
        slot = self._staging.take_for_load()
        if slot is None:
            return False
        self._count += 1
        chunk.slot, chunk.posted_s = slot, self._clock.now_s()
        index = (slot - self._staging.address) // self._staging.slot_bytes
        read = chunk.read
        place = Place(self._count, read.chunk, read.start_token, read.end_token, index)
        self._open[self._count] = _Invitation(chunk, place)
        chunk.session.invited_count += 1
        return True

    def take(self, answer: Answer) -> ChunkJob | None:
        """Returns the chunk of a page that was written, if somebody wants it: the slot is the
        caller's then, and the page to be proven. A chunk that brought nothing fails its load."""
        invitation = self._open.get(answer.number)
        if invitation is None:
            return None
        chunk = invitation.chunk
        self._close(invitation)
        self._metrics.count("kvferry_transfer_pages_total", outcome=answer.outcome.value)
        if answer.outcome is Outcome.LOST:
            self._resting.add(chunk.slot)
        elif answer.outcome is Outcome.WRITTEN and chunk.is_wanted:
            self._observe(chunk)
            chunk.checksums = answer.checksums
            return chunk
        else:
            self._staging.give_back(chunk.slot)
        if chunk.is_wanted:
            chunk.job.failure = "lost" if answer.outcome is Outcome.LOST else "refused"
        return None

    def give_back(self, chunk: ChunkJob) -> None:
        """Nothing reads from the chunk's slot any more."""
        self._staging.give_back(chunk.slot)

    def step(self) -> list[ChunkJob]:
        """Says what is due. Returns chunks that cannot come any more: their producer is away."""
        now_s = self._clock.now_s()
        due: defaultdict[tuple, list[_Invitation]] = defaultdict(list)
        lost = []
        for invitation in list(self._open.values()):
            chunk = invitation.chunk
            if not chunk.session.is_ready and chunk.is_wanted:
                lost.append(chunk)
            elif not chunk.session.is_ready:
                self._pursue(invitation)
            elif self._is_due(invitation, now_s):
                what = chunk.is_wanted, chunk.offer.transfer, chunk.session, chunk.channel
                due[what].append(invitation)
        for (is_wanted, *_), invitations in due.items():
            for first in range(0, len(invitations), PLACES_MAX):
                self._say(invitations[first : first + PLACES_MAX], is_wanted, now_s)
        self._resting.step()
        self._metrics.set("kvferry_transfer_quarantine_bytes", self.quarantine_bytes)
        return lost

    def _is_due(self, invitation: _Invitation, now_s: float) -> bool:
        is_news = invitation.is_stopped is invitation.chunk.is_wanted
        return is_news or now_s >= invitation.said_s + REPEAT_S

    def _say(self, invitations: list[_Invitation], is_wanted: bool, now_s: float) -> None:
        """All of one transfer and channel."""
        chunk = invitations[0].chunk
        session, offer = chunk.session, chunk.offer
        for invitation in invitations:
            invitation.said_s, invitation.is_stopped = now_s, not is_wanted
        places = tuple(invitation.place for invitation in invitations)
        if is_wanted:
            channel: PushChannel = chunk.channel
            staging = self._staging
            slots = Slots(staging.address, staging.slot_bytes, staging.slot_count)
            body = Invite(
                self._link.name,
                self._description,
                offer.transfer,
                offer.key,
                channel.cut,
                slots,
                places,
            )
        else:
            numbers = tuple(place.number for place in places)
            body = Stop(self._link.name, self._description, offer.transfer, numbers)
        frame = seal_message(self._settings.secret, session.name, body)
        if not self._link.notify(session.name, frame):
            self._peers.lose(session)

    def _pursue(self, invitation: _Invitation) -> None:
        """Its producer cannot be told to stop. It is dialled; if it is gone, so are its writes."""
        chunk = invitation.chunk
        self._peers.want(chunk.offer)
        if self._peers.is_gone(chunk.offer.boot):
            self._close(invitation)
            self._resting.add(chunk.slot)

    def _close(self, invitation: _Invitation) -> None:
        del self._open[invitation.place.number]
        invitation.chunk.session.invited_count -= 1

    def _observe(self, chunk: ChunkJob) -> None:
        channel: PushChannel = chunk.channel
        peer, now_s = chunk.session.address, self._clock.now_s()
        self._metrics.count("kvferry_transfer_pushed_bytes_total", channel.geometry.page_bytes)
        self._metrics.observe("kvferry_transfer_page_seconds", now_s - chunk.posted_s, peer=peer)
