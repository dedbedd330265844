"""What one consumer rank may read: transfers that requests wait for, claimed at every source rank.

Life of a transfer:

1. CLAIMING from the moment a request that carries its offer is queued: the peer is dialled, every
   rank that this one attends to is asked to keep the blocks, again and again until it answers.
2. HELD when all have: the requests are reported granted. Claims go on as renewals; each answer
   moves the time until which the blocks are surely kept.
3. REFUSED, with a reason, if a source says that it is gone, is not ours to read, or does not answer
   in time. What was read before and is proven stays good; the rest is not.
4. Over when no request wants it any more, after a moment for siblings (n > 1): sources are told,
   and it is never claimed again.

One thread: the mover's, except that the engine's empties `granted` and `refused`.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

from kvferry.clock import Clock
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link
from kvferry.transfer.lease import REMEMBERED_MAX, HeldUntil
from kvferry.transfer.messages import Claim, Grant, Release, State, seal_message
from kvferry.transfer.params import Offer
from kvferry.transfer.session import Peer, Peers, PeerState, Session
from kvferry.transfer.settings import Settings

LINGER_S = 0.2
"""For how long a transfer stays claimed after its last request has let go of it."""
RENEWAL_PART = 0.25
"""Of what a source granted, after which it is asked again: two renewals may be lost. How long that
is, the source alone knows: its settings are its own."""
REPEAT_S = 0.25
"""After how long a claim without an answer is said again, and the soonest renewal."""
LOOK_S = 0.05
"""How often a transfer is looked at that has all it needs: there may be hundreds."""


@dataclass(slots=True)
class RankClaim:
    """One transfer at one source rank. `sent_s` and `sent_serial`: of the last claim;
    `answered_serial`: of the last one that was answered; `renewal_s`: how long that will do."""

    held: HeldUntil = field(default_factory=HeldUntil)
    generation: bytes = b""
    tables: tuple[tuple[int, ...], ...] = ()
    sent_s: float = float("-inf")
    sent_serial: int = 0
    answered_serial: int = 0
    renewal_s: float = 0.0
    is_urgent: bool = False

    @property
    def is_granted(self) -> bool:
        return bool(self.generation)


class Told(Enum):
    """What a request knows of its transfer."""

    NOTHING = "nothing"
    GRANTED = "granted"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Transfer:
    """See the module. `users`: requests, and what they were told last. `due_s`: when to look at it
    again."""

    offer: Offer
    peer: Peer
    deadline_s: float
    due_s: float = float("-inf")
    users: dict[str, Told] = field(default_factory=dict)
    claims: dict[int, RankClaim] = field(default_factory=dict)
    refusal: str = ""
    idle_since_s: float | None = None

    @property
    def is_granted(self) -> bool:
        sessions = self.peer.sessions
        return (
            not self.refusal
            and bool(sessions)
            and all(rank in self.claims and self.claims[rank].is_granted for rank in sessions)
        )


class Claims:
    """See the module."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        peers: Peers,
        rank: int,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._peers = peers
        self._rank = rank
        self._needs_tables = settings.direction == "pull"
        self._serial = 0
        self._transfers: dict[bytes, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._description = b""
        self.granted: deque[str] = deque()
        self.refused: deque[tuple[str, str]] = deque()

    def open(self, description: bytes) -> None:
        """`description`: of our end, so that sources can answer."""
        self._description = description

    @property
    def is_idle(self) -> bool:
        return not self._transfers

    @property
    def serial(self) -> int:
        """Of the last claim that was sent: an answer to a greater one was given after now."""
        return self._serial

    def watch(self, request_id: str, offer: Offer) -> None:
        if offer.transfer in self._over:
            self.refused.append((request_id, "over"))
            return
        transfer = self._transfers.get(offer.transfer)
        if transfer is None:
            deadline_s = self._clock.now_s() + self._settings.claim_deadline_s
            transfer = Transfer(offer, self._peers.want(offer), deadline_s)
            self._transfers[offer.transfer] = transfer
        transfer.users[request_id] = Told.NOTHING
        transfer.due_s = self._clock.now_s()
        transfer.idle_since_s = None
        self._by_request[request_id] = transfer

    def of(self, request_id: str) -> Transfer | None:
        return self._by_request.get(request_id)

    def let_go(self, request_id: str) -> None:
        """The request needs its transfer no more. Idempotent."""
        transfer = self._by_request.pop(request_id, None)
        if transfer is not None:
            del transfer.users[request_id]
            if not transfer.users:
                transfer.idle_since_s = self._clock.now_s()

    def step(self) -> None:
        now_s = self._clock.now_s()
        for transfer in list(self._transfers.values()):
            if now_s >= transfer.due_s and not transfer.refusal:
                self._pursue(transfer, now_s)
                self._tell(transfer)
                transfer.due_s = now_s + LOOK_S if transfer.is_granted else now_s
            elif transfer.refusal:
                self._tell(transfer)
            idle_since_s = transfer.idle_since_s
            if idle_since_s is not None and (transfer.refusal or now_s > idle_since_s + LINGER_S):
                self._end(transfer)

    def confirm(self, transfer: Transfer, rank: int) -> None:
        """Asks a source at once whether it still holds what was read."""
        transfer.claims[rank].is_urgent = True
        transfer.due_s = self._clock.now_s()

    def refuse(self, transfer: Transfer, reason: str) -> None:
        if not transfer.refusal:
            transfer.refusal = reason
            self._metrics.count("kvferry_transfer_claims_refused_total", reason=reason)

    def take(self, grant: Grant) -> None:
        """A source's answer."""
        transfer = self._transfers.get(grant.transfer)
        if transfer is None or transfer.refusal:
            return
        for rank, claim in transfer.claims.items():
            session = transfer.peer.sessions.get(rank)
            if session is not None and session.name == grant.sender:
                self._granted(transfer, claim, grant)

    def _granted(self, transfer: Transfer, claim: RankClaim, grant: Grant) -> None:
        if not claim.held.granted(grant.serial, grant.valid_s):
            return
        claim.answered_serial = grant.serial
        claim.renewal_s = max(grant.valid_s * RENEWAL_PART, REPEAT_S)
        if grant.state is State.GONE:
            self.refuse(transfer, "gone")
        elif claim.generation not in (b"", grant.generation):
            self.refuse(transfer, "generation")
        elif grant.token_count != transfer.offer.token_count:
            self.refuse(transfer, "tokens")
        elif claim.is_granted or grant.tables or not self._needs_tables:
            claim.generation = grant.generation
            claim.tables = claim.tables or grant.tables

    def _pursue(self, transfer: Transfer, now_s: float) -> None:
        peer = transfer.peer
        if peer.state is PeerState.FOREIGN:
            self.refuse(transfer, "foreign")
        elif peer.is_retired:
            self.refuse(transfer, "restarted")
        elif peer.state is PeerState.AWAY and now_s < peer.retry_s:
            self.refuse(transfer, "unreachable")
        elif now_s > transfer.deadline_s and not transfer.is_granted:
            self.refuse(transfer, "late")
        else:
            self._peers.want(transfer.offer)
            for rank, session in peer.sessions.items():
                claim = transfer.claims.setdefault(rank, RankClaim())
                if session.is_ready and self._is_due(claim, now_s):
                    self._say(transfer, claim, session, now_s)

    def _is_due(self, claim: RankClaim, now_s: float) -> bool:
        if claim.is_urgent:
            return True
        is_answered = claim.answered_serial == claim.sent_serial
        wait_s = claim.renewal_s if is_answered else REPEAT_S
        return now_s >= claim.sent_s + wait_s

    def _say(self, transfer: Transfer, claim: RankClaim, session: Session, now_s: float) -> None:
        self._serial += 1
        claim.held.asked(self._serial, now_s)
        claim.sent_s, claim.sent_serial, claim.is_urgent = now_s, self._serial, False
        body = Claim(
            self._link.name,
            self._description,
            self._serial,
            transfer.offer.transfer,
            self._rank,
            session.reader_count,
            self._needs_tables and not claim.is_granted,
        )
        self._send(session, body)

    def _send(self, session: Session, body: Claim | Release) -> None:
        frame = seal_message(self._settings.secret, session.name, body)
        if not self._link.notify(session.name, frame):
            self._peers.lose(session)

    def _tell(self, transfer: Transfer) -> None:
        if not (transfer.refusal or transfer.is_granted):
            return
        news = Told.REFUSED if transfer.refusal else Told.GRANTED
        for request_id in [user for user, told in transfer.users.items() if told is not news]:
            transfer.users[request_id] = news
            if transfer.refusal:
                self.refused.append((request_id, transfer.refusal))
            else:
                self.granted.append(request_id)

    def _end(self, transfer: Transfer) -> None:
        for rank in transfer.claims:
            session = transfer.peer.sessions.get(rank)
            if session is not None and session.is_ready:
                offer, count = transfer.offer, session.reader_count
                self._send(session, Release(self._link.name, offer.transfer, self._rank, count))
        del self._transfers[transfer.offer.transfer]
        self._over[transfer.offer.transfer] = None
        while len(self._over) > REMEMBERED_MAX:
            self._over.popitem(last=False)
