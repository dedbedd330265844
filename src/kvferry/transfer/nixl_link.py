"""The real link: a NIXL agent (RDMA, NVLink, shared memory, TCP by what UCX finds).

What NIXL does not do is done here or by those above: it has no deadlines and no way to call a post
back; releasing a handle or removing a peer stops nothing (`base` says what follows from that). It
does not notice that a peer is gone until it is used, so a peer that failed is removed and added
again by whoever wants it. A name is used once: NIXL refuses another process under a known name.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvferry._nixl import DONE, HOST, Agent, Handle, Memory, NixlError
from kvferry.clock import Clock
from kvferry.errors import (
    ClosedError,
    ConfigError,
    IncompatibleError,
    InternalError,
    UnavailableError,
)
from kvferry.transfer.base import (
    MESSAGE_BYTES_MAX,
    Ending,
    Event,
    Indices,
    Message,
    PostEnded,
    Range,
    Stride,
)

POLL_S = 0.001
NOT_THERE = "nixlNotFoundError"
GONE = "nixlRemoteDisconnectError"
KINDS = ("DRAM", "VRAM")
WHERE = struct.Struct("<BI")
"""A description is where the memory lies (kind, index), then what NIXL says."""
NO_DESCRIPTION = ("nixlMismatchError", "nixlInvalidParamError", "nixlNotAllowedError")


@dataclass(frozen=True, slots=True)
class _Table:
    peer: str | None
    handle: Handle


@dataclass(frozen=True, slots=True)
class _Post:
    peer: str
    handle: Handle


class NixlLink:
    """See `base` and the module. Nothing moves on a transport without hardware for it but in calls
    of the owner's, also what peers read: `poll` often.

    `backends`: of NIXL. `memory`: where all lies that is registered here; a peer's may lie
    elsewhere.
    """

    def __init__(self, clock: Clock, backends: Sequence[str] = ("UCX",), memory: Memory = HOST):
        self._clock = clock
        self._backends = tuple(backends)
        self._memory = memory
        self._name = ""
        self._agent: Agent | None = None
        self._registered: dict[Range, Handle] = {}
        self._peers: dict[str, Memory] = {}
        self._tables: dict[int, _Table] = {}
        self._table_count = 0
        self._posts: dict[int, _Post] = {}
        self._post_count = 0
        self._ended: list[Event] = []
        self._transport = "none"

    @property
    def name(self) -> str:
        return self._name

    @property
    def transport(self) -> str:
        return self._transport

    def open(self) -> None:
        self._name = "kvferry-" + self._clock.random_bytes(12).hex()
        try:
            self._agent = Agent(self._name, self._backends, self._memory)
        except NixlError as error:
            raise ConfigError("nixl.open", f"NIXL does not start: {error}") from error

    def close(self, timeout_s: float) -> bool:
        """As the contract says. With posts out the agent is kept: what it has registered must not
        be unmapped."""
        if self._agent is None:
            return True
        end_s = self._clock.now_s() + timeout_s
        while self._posts and self._clock.now_s() < end_s:
            self._collect()
            self._clock.sleep(POLL_S)
        if self._posts:
            return False
        for table in list(self._tables):
            self.drop_table(table)
        for peer in list(self._peers):
            self.disconnect(peer)
        agent, self._agent = self._agent, None
        for registration in self._registered.values():
            agent.deregister(registration)
        self._registered = {}
        return True

    def register(self, memory: Range) -> None:
        try:
            handle = self._open_agent().register(memory.address, memory.length_bytes)
        except NixlError as error:
            raise ConfigError(
                "nixl.register",
                f"{memory.length_bytes} bytes of {self._memory.kind} cannot be registered: {error}",
            ) from error
        self._registered[memory] = handle

    def describe(self, reachable: Sequence[Range] = ()) -> bytes:
        unknown = [memory for memory in reachable if memory not in self._registered]
        if unknown:
            raise InternalError("link.describe", "a range that was not registered as it is")
        where = WHERE.pack(KINDS.index(self._memory.kind), self._memory.index)
        return where + self._open_agent().describe([(m.address, m.length_bytes) for m in reachable])

    def connect(self, description: bytes) -> str:
        agent = self._open_agent()
        memory = _memory_of(description)
        try:
            peer = agent.add_peer(description[WHERE.size :])
        except NixlError as error:
            if error.name in NO_DESCRIPTION:
                raise IncompatibleError("link.description", f"no description: {error}") from error
            raise UnavailableError("link.connect", f"cannot reach a peer: {error}") from error
        self._peers[peer] = memory
        return peer

    def disconnect(self, peer: str) -> None:
        agent = self._open_agent()
        if any(post.peer == peer for post in self._posts.values()):
            raise InternalError("link.disconnect", "a post to this peer is out", peer=peer)
        for number in [n for n, table in self._tables.items() if table.peer == peer]:
            self.drop_table(number)
        if self._peers.pop(peer, None) is not None:
            self._best_effort(agent.remove_peer, peer)

    def table(self, peer: str | None, strides: Sequence[Stride]) -> int:
        agent = self._open_agent()
        if peer is not None and peer not in self._peers:
            raise UnavailableError("link.peer", "this peer is not connected", peer=peer)
        rows = [(s.address, s.piece_bytes, s.stride_bytes, s.count) for s in strides]
        try:
            handle = agent.table(peer or "", rows, self._peers[peer] if peer else self._memory)
        except NixlError as error:
            if error.name == GONE:
                raise UnavailableError("link.peer", f"the peer is gone: {error}") from error
            raise IncompatibleError(
                "link.range", f"memory that was not described: {error}", peer=peer
            ) from error
        self._table_count += 1
        self._tables[self._table_count] = _Table(peer, handle)
        return self._table_count

    def drop_table(self, table: int) -> None:
        found = self._tables.pop(table, None)
        if found is not None and self._agent is not None:
            self._best_effort(self._agent.drop_table, found.handle)

    def post(
        self,
        peer: str,
        target: int,
        target_indices: Indices,
        source: int,
        source_indices: Indices,
        notice: bytes = b"",
    ) -> int:
        agent = self._open_agent()
        self._post_count += 1
        number = self._post_count
        to, of = self._tables.get(target), self._tables.get(source)
        owners = (to.peer, of.peer) if to and of else ()
        if owners not in ((None, peer), (peer, None)) or not target_indices:
            self._ended.append(PostEnded(number, Ending.REFUSED, "no such table, or nothing"))
            return number
        try:
            if owners[0] is None:
                sides = "READ", to.handle, target_indices, of.handle, source_indices
            else:
                sides = "WRITE", of.handle, source_indices, to.handle, target_indices
            handle = agent.make_post(*sides, notice)
            self._transport = agent.backend(handle)
        except NixlError as error:
            ending = Ending.LOST if error.name == GONE else Ending.REFUSED
            self._ended.append(PostEnded(number, ending, str(error)))
            return number
        self._posts[number] = _Post(peer, handle)
        self._look(number, agent.begin)
        return number

    def notify(self, peer: str, content: bytes) -> bool:
        agent = self._open_agent()
        if peer not in self._peers or len(content) > MESSAGE_BYTES_MAX:
            return False
        return self._best_effort(agent.send, peer, content)

    def poll(self) -> list[Event]:
        agent = self._open_agent()
        self._collect()
        events, self._ended = self._ended, []
        with suppress(NixlError):  # posts and messages to the peer in question fail as well
            events += [Message(sender, content) for sender, content in agent.received()]
        return events

    def _collect(self) -> None:
        for number in list(self._posts):
            self._look(number, self._agent.state)

    def _look(self, number: int, ask) -> None:
        """Asks NIXL about a post that is out, and takes it in if it has ended."""
        post, ending, reason = self._posts[number], Ending.DONE, ""
        try:
            if ask(post.handle) != DONE:
                return
        except NixlError as error:
            ending, reason = Ending.LOST, str(error)
        del self._posts[number]
        self._best_effort(self._agent.drop_post, post.handle)
        self._ended.append(PostEnded(number, ending, reason))

    def _best_effort(self, call, *arguments) -> bool:
        try:
            call(*arguments)
        except NixlError:
            return False
        return True

    def _open_agent(self) -> Agent:
        if self._agent is None:
            raise ClosedError("link.closed", "this end is not open")
        return self._agent


def _memory_of(description: bytes) -> Memory:
    """Raises IncompatibleError."""
    kind, index = WHERE.unpack(description[: WHERE.size].ljust(WHERE.size, b"\xff"))
    if kind >= len(KINDS):
        raise IncompatibleError("link.description", "no description: it does not say which memory")
    return Memory(KINDS[kind], index)
