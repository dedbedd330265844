"""Producers as one consumer rank knows them: a peer is one boot of one engine, a session is one of
its ranks.

Life of a peer: DIALING until the handshake is answered, then KNOWN; AWAY after a failure that may
pass (dialled again after `redial_s` if somebody wants it); FOREIGN if nothing must be exchanged
until its process is another one. A peer that answers at the address of another boot retires that
one: nothing new is begun with it.

Life of a session: READY with connection and tables, LOST when a read or message failed. Forgetting
a connection is no fence for what was posted on it, so a lost session waits until all its reads have
ended; then it is connected anew, with what the handshake said before. Meanwhile the peer is dialled
again: if nobody answers, its process is gone and nobody need wait for it.

One thread: the mover's.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import Protocol

from kvferry.clock import Clock
from kvferry.errors import ConfigError, Error, IncompatibleError, UnavailableError
from kvferry.metrics import Metrics
from kvferry.transfer.base import Link, Range
from kvferry.transfer.channel import Channel, PushChannel, ReadChannel
from kvferry.transfer.cut import cut_of, lane_geometry
from kvferry.transfer.handshake import Introduction, RankEnd
from kvferry.transfer.landing import Landing
from kvferry.transfer.params import Offer
from kvferry.transfer.plan import Lane, lanes, readers
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import RankLayout
from kvferry.transfer.unload import Unloaders

log = logging.getLogger(__name__)

DIALS_MAX = 8
"""Handshakes at a time."""


class PeerState(Enum):
    """See the module."""

    DIALING = "dialing"
    KNOWN = "known"
    AWAY = "away"
    FOREIGN = "foreign"


class SessionState(Enum):
    """See the module."""

    READY = "ready"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Session:
    """`reads_out`: posted and not ended; `invited_count`: what it may still write. `reader_count`:
    of this engine, at that rank. `address`: of its peer, for people."""

    end: RankEnd
    lanes: tuple[Lane, ...]
    reader_count: int
    address: str = ""
    name: str = ""
    state: SessionState = SessionState.LOST
    retry_s: float = float("-inf")
    reads_out: int = 0
    invited_count: int = 0
    channels: tuple[Channel, ...] = ()

    @property
    def rank(self) -> int:
        return self.end.layout.rank

    @property
    def is_ready(self) -> bool:
        return self.state is SessionState.READY


@dataclass(slots=True, eq=False)
class Peer:
    """`used_s`: when it was wanted last; `dialled_s`: when it was dialled last. `reason`: of AWAY
    and FOREIGN, for people."""

    boot: bytes
    address: tuple[str, int]
    state: PeerState
    used_s: float
    dialled_s: float = 0.0
    retry_s: float = 0.0
    reason: str = ""
    is_retired: bool = False
    sessions: dict[int, Session] = field(default_factory=dict)


Dialled = tuple[bytes, Introduction | Error]
"""The boot that was asked for, and what came of it."""


class Dialer(Protocol):
    """Makes handshakes elsewhere than on the caller's thread."""

    def submit(self, offer: Offer) -> None:
        """Begins one; not twice for a boot at a time."""

    def poll(self) -> list[Dialled]:
        """What has come of those that ended. Never waits."""


class ThreadDialer:
    """Each handshake on a thread of its own, which ends within `dial_timeout_s`. One that cannot
    begin, or ends as nobody expected, is unavailable: who waits for it is always told."""

    def __init__(self, dial: Callable[[Offer], Introduction]):
        self._dial = dial
        self._results: SimpleQueue[Dialled] = SimpleQueue()

    def submit(self, offer: Offer) -> None:
        thread = threading.Thread(
            target=self._run, args=(offer,), name="kvferry-dialer", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            failure = UnavailableError("transfer.dial", f"no thread for a handshake: {error}")
            self._results.put((offer.boot, failure))

    def poll(self) -> list[Dialled]:
        return [self._results.get() for _ in range(self._results.qsize())]

    def _run(self, offer: Offer) -> None:
        result: Introduction | Error = UnavailableError("transfer.dial", "it has failed")
        try:
            result = self._dial(offer)
        except Error as error:
            result = error
        finally:
            self._results.put((offer.boot, result))


class Peers:
    """See the module. `targets`: layouts of all ranks of this engine; `memory`: staging."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        link: Link,
        dialer: Dialer,
        layout: RankLayout,
        targets: Sequence[RankLayout],
        unloaders: Unloaders,
    ):
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._link = link
        self._dialer = dialer
        self._layout = layout
        self._targets = tuple(targets)
        self._unloaders = unloaders
        self._memory = Range(0, 0)
        self._peers: dict[bytes, Peer] = {}

    def open(self, memory: Range) -> None:
        """`memory`: staging, registered with the link."""
        self._memory = memory

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def want(self, offer: Offer) -> Peer:
        """The peer of an offer, dialled if it is not known."""
        now_s = self._clock.now_s()
        peer = self._peers.get(offer.boot)
        if peer is None:
            peer = Peer(offer.boot, (offer.host, offer.port), PeerState.AWAY, now_s)
            self._peers[offer.boot] = peer
        peer.used_s = now_s
        dialing_count = sum(p.state is PeerState.DIALING for p in self._peers.values())
        if peer.state is PeerState.AWAY and now_s >= peer.retry_s and dialing_count < DIALS_MAX:
            peer.state, peer.dialled_s = PeerState.DIALING, now_s
            self._dialer.submit(offer)
        return peer

    def is_gone(self, boot: bytes) -> bool:
        """Nobody answers there, or another process does."""
        peer = self._peers[boot]
        is_dialled_in_vain = peer.state in (PeerState.AWAY, PeerState.FOREIGN) and peer.reason
        return peer.is_retired or bool(is_dialled_in_vain)

    def step(self) -> bool:
        """One round. True if anything moved."""
        results = self._dialer.poll()
        for boot, result in results:
            if boot in self._peers:
                self._dialled(self._peers[boot], result)
        for peer in list(self._peers.values()):
            for session in peer.sessions.values():
                self._mend(peer, session)
            self._forget_idle(peer)
        return bool(results)

    def lose(self, session: Session) -> None:
        """A read from it was lost, or a message could not be sent."""
        if session.is_ready:
            session.state = SessionState.LOST
            session.retry_s = self._clock.now_s() + self._settings.redial_s
            self._metrics.count("kvferry_transfer_sessions_lost_total")
            for peer in self._peers.values():
                if session in peer.sessions.values() and peer.state is PeerState.KNOWN:
                    peer.state, peer.retry_s = PeerState.AWAY, self._clock.now_s()

    def close(self) -> None:
        """Forgets all that no read hangs on."""
        for peer in list(self._peers.values()):
            self._forget(peer)

    def _dialled(self, peer: Peer, result: Introduction | Error) -> None:
        if isinstance(result, Introduction):
            try:
                peer.sessions = peer.sessions or self._sessions(peer, result)
                peer.state, peer.reason = PeerState.KNOWN, ""
                self._retire_others(peer)
            except (IncompatibleError, ConfigError) as error:
                result = error
        if isinstance(result, Error):
            is_foreign = isinstance(result, IncompatibleError | ConfigError)
            peer.state = PeerState.FOREIGN if is_foreign else PeerState.AWAY
            peer.retry_s = self._clock.now_s() + self._settings.redial_s
            if peer.reason != str(result):
                log.warning("no KV from the producer at %s port %d: %s", *peer.address, result)
            peer.reason = str(result)
        self._metrics.count("kvferry_transfer_handshakes_total", outcome=peer.state.value)
        handshake_s = self._clock.now_s() - peer.dialled_s
        self._metrics.observe("kvferry_transfer_handshake_seconds", handshake_s)

    def _retire_others(self, peer: Peer) -> None:
        """Who answers at an address is the process that is there now."""
        for other in self._peers.values():
            if other is not peer and other.address == peer.address:
                other.is_retired = True

    def _sessions(self, peer: Peer, introduction: Introduction) -> dict[int, Session]:
        """One for each rank that this rank attends to. Raises IncompatibleError or ConfigError."""
        sources = [end.layout for end in introduction.ranks]
        mine = lanes(self._layout, sources)
        attended = readers(self._targets, sources)
        return {
            end.layout.rank: Session(
                end,
                tuple(lane for lane in mine if lane.source_rank == end.layout.rank),
                len(attended[end.layout.rank]),
                "{} port {}".format(*peer.address),
            )
            for end in introduction.ranks
            if self._layout.rank in attended[end.layout.rank]
        }

    def _mend(self, peer: Peer, session: Session) -> None:
        """Connects a session that is not, if nothing is out on it."""
        now_s = self._clock.now_s()
        if peer.state is not PeerState.KNOWN or peer.is_retired:
            return
        if session.is_ready or session.reads_out or now_s < session.retry_s:
            return
        self._disconnect(session)
        try:
            session.name = self._link.connect(session.end.description)
            for lane in session.lanes:  # what was made is dropped if another one fails
                session.channels += (self._channel(session, lane),)
            session.state = SessionState.READY
        except UnavailableError:
            session.retry_s = now_s + self._settings.redial_s
        except (IncompatibleError, ConfigError) as error:
            peer.state, peer.reason = PeerState.FOREIGN, str(error)
            session.retry_s = float("inf")

    def _channel(self, session: Session, lane: Lane) -> Channel:
        if self._settings.direction == "push":
            settings = self._settings
            cut = cut_of(lane, settings.slot_bytes, settings.page_tokens_max)
            geometry = lane_geometry(lane, cut)
            return PushChannel(lane, cut, geometry, self._unloaders.of_pages(lane, geometry))
        landing = Landing(lane, self._memory, self._settings.slot_bytes)
        unloader = self._unloaders.of(lane, landing)
        source_table = self._link.table(session.name, lane.source_strides())
        target_table = self._link.table(None, landing.strides())
        return ReadChannel(lane, landing, target_table, source_table, unloader)

    def _forget_idle(self, peer: Peer) -> None:
        is_idle = self._clock.now_s() - peer.used_s > self._settings.peer_idle_s
        if (is_idle or peer.is_retired) and peer.state is not PeerState.DIALING:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if any(session.reads_out or session.invited_count for session in peer.sessions.values()):
            return
        for session in peer.sessions.values():
            self._disconnect(session)
        del self._peers[peer.boot]

    def _disconnect(self, session: Session) -> None:
        for channel in session.channels:
            channel.drop(self._link)
        session.channels = ()
        session.state = SessionState.LOST
        if session.name:
            self._link.disconnect(session.name)
            session.name = ""
