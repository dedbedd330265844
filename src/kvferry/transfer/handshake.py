"""How a consumer's rank learns where a producer's ranks keep what: one connection, two phases.

    reader                                       listener
      Hello     its nonce, compatibility   --->
                                           <---  Greeting  its nonce, boot, compatibility
      Ask                                  --->
                                           <---  Introduction  of all ranks: layout, link

Each frame is sealed, the last two in the context of both nonces. Before a Hello with a right code
nothing but a closed connection is the answer; what an Introduction opens is read access to the
whole KV cache. On the wire a frame has its length, u32, in front.

The listener serves what it was last given. Each connection has a few seconds and a small frame, and
gives way to newer ones until it has shown with its Ask that it knows the secret (a Hello may be a
recorded one). Nothing that arrives can end the listener.
"""

import logging
import socket
import struct
import threading
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import msgspec

from kvferry.clock import Clock
from kvferry.errors import ConfigError, Error, IncompatibleError, UnavailableError
from kvferry.metrics import Metrics
from kvferry.transfer.compatibility import Compatibility, agree
from kvferry.transfer.frames import seal, unseal
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import RankLayout, check_layout

log = logging.getLogger(__name__)

NONCE_BYTES = 16
REQUEST_BYTES_MAX = 64 << 10
INTRODUCTION_BYTES_MAX = 32 << 20
CONNECTIONS_MAX = 64
ROOM_WAIT_S = 1.0
"""How long a connection that was told to give way may take."""
LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: bytes
    compatibility: Compatibility


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    nonce: bytes
    boot: bytes
    compatibility: Compatibility


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`boot`: the one that the reader's offer names."""

    boot: bytes


class RankEnd(msgspec.Struct, frozen=True, array_like=True):
    """One rank of the producer: how its memory looks, and how to reach it (`Link.describe`)."""

    layout: RankLayout
    description: bytes


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    boot: bytes
    ranks: tuple[RankEnd, ...]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: str


class Connection:
    """One side of one handshake: frames over a socket that the caller closes. A deadline bounds all
    of it."""

    def __init__(self, stream: socket.socket, secret: bytes, clock: Clock, timeout_s: float):
        self._stream = stream
        self._secret = secret
        self._clock = clock
        self._end_s = clock.now_s() + timeout_s

    def send(self, context: bytes, body: msgspec.Struct) -> None:
        frame = seal(self._secret, context, body)
        self._stream.settimeout(self._left_s())
        self._stream.sendall(LENGTH.pack(len(frame)) + frame)

    def receive(self, context: bytes, body_type: Any, bytes_max: int) -> Any:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > bytes_max:
            raise IncompatibleError("frame.size", f"a frame of {length} bytes is not expected")
        return unseal(self._secret, context, self._exactly(length), body_type, bytes_max)

    def _exactly(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            self._stream.settimeout(self._left_s())
            piece = self._stream.recv(min(count - len(content), 1 << 16))
            if not piece:
                raise ConnectionError("the peer has hung up")
            content += piece
        return bytes(content)

    def _left_s(self) -> float:
        left_s = self._end_s - self._clock.now_s()
        if left_s <= 0:
            raise TimeoutError("the handshake takes too long")
        return left_s


def dial(
    host: str, port: int, boot: bytes, mine: Compatibility, settings: Settings, clock: Clock
) -> Introduction:
    """Asks the listener there. Blocks for at most `dial_timeout_s`, so never on an engine's thread.
    UnavailableError if nobody answers, or another boot than that of the offer; IncompatibleError if
    we and the peer must not exchange anything."""
    try:
        with socket.create_connection((host, port), settings.dial_timeout_s) as stream:
            connection = Connection(stream, settings.secret, clock, settings.dial_timeout_s)
            return _introduction(connection, boot, mine, clock)
    except OSError as error:
        raise UnavailableError(
            "transfer.dial", f"no producer answers at {host} port {port}: {error}"
        ) from error


def _introduction(
    connection: Connection, boot: bytes, mine: Compatibility, clock: Clock
) -> Introduction:
    nonce = clock.random_bytes(NONCE_BYTES)
    connection.send(b"hello", Hello(nonce, mine))
    greeting = connection.receive(b"greeting" + nonce, Greeting | Refusal, REQUEST_BYTES_MAX)
    _require_answer(greeting)
    if greeting.boot != boot:
        raise UnavailableError(
            "transfer.boot",
            "the producer has been restarted, or another one is at its address",
            expected=boot.hex(),
            received=greeting.boot.hex(),
        )
    agree(mine, greeting.compatibility)
    both = nonce + greeting.nonce
    connection.send(b"ask" + both, Ask(boot))
    answer = connection.receive(
        b"introduction" + both, Introduction | Refusal, INTRODUCTION_BYTES_MAX
    )
    _require_answer(answer)
    for end in answer.ranks:
        check_layout(end.layout)
    return answer


def _require_answer(answer: Greeting | Introduction | Refusal) -> None:
    if isinstance(answer, Refusal):
        raise IncompatibleError("transfer.refused", f"the producer refuses: {answer.reason}")


class Listener:
    """Answers readers, on threads of its own. `open` binds (an address that is taken is an error
    there and then); `serve` says what to answer; `close` is idempotent."""

    def __init__(
        self,
        settings: Settings,
        boot: bytes,
        mine: Compatibility,
        clock: Clock,
        metrics: Metrics,
        engine_index: int = 0,
    ):
        """`engine_index`: among data-parallel engines, which listen at consecutive ports."""
        self._settings = settings
        self._engine_index = engine_index
        self._boot = boot
        self._mine = mine
        self._clock = clock
        self._metrics = metrics
        self._ranks: tuple[RankEnd, ...] = ()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}  # oldest first
        self._must_stop = False

    def open(self) -> None:
        """Raises ConfigError if the address cannot be bound, or must not be."""
        host, port = self._settings.bind_host or "127.0.0.1", self._settings.bind_port
        port += self._engine_index if port else 0
        check_addresses(self._settings)
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                "transfer.bind",
                f"cannot listen at bind_host={host!r} bind_port={port}: {error}",
                key="bind_host",
            ) from error
        self._socket.settimeout(0.2)
        self._thread = threading.Thread(target=self._loop, name="kvferry-listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def serve(self, ranks: tuple[RankEnd, ...]) -> None:
        """From now on readers get this. Any thread."""
        self._ranks = ranks

    def close(self) -> None:
        self._must_stop = True
        if self._thread is not None:
            self._thread.join(2.0)
        if self._socket is not None:
            self._socket.close()

    def _loop(self) -> None:
        while not self._must_stop:
            try:
                stream, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # out of descriptors: those that we hold are closed by their deadlines
                self._count("busy")
                self._clock.sleep(0.05)
                continue
            if not self._make_room():
                self._count("busy")
                stream.close()
                continue
            with self._lock:
                self._unproven[stream] = None
            try:
                threading.Thread(target=self._answer, args=(stream,), daemon=True).start()
            except RuntimeError:  # out of threads
                self._count("busy")
                self._proven(stream)
                stream.close()
                self._room.release()

    def _make_room(self) -> bool:
        """Takes a place for one more connection, that of the oldest unproven one if there is no
        other."""
        if self._room.acquire(blocking=False):
            return True
        with self._lock:
            oldest = next(iter(self._unproven), None)
            if oldest is not None:
                del self._unproven[oldest]
                with suppress(OSError):  # its own side may have hung up
                    oldest.shutdown(socket.SHUT_RDWR)
        return self._room.acquire(timeout=ROOM_WAIT_S)

    def _proven(self, stream: socket.socket) -> None:
        """It gives way no more. Idempotent."""
        with self._lock:
            self._unproven.pop(stream, None)

    def _answer(self, stream: socket.socket) -> None:
        try:
            with stream:
                try:
                    self._converse(stream)
                finally:
                    self._proven(stream)
            self._count("served")
        except IncompatibleError as error:
            self._count("incompatible" if error.kind.startswith("transfer") else "foreign")
        except (OSError, Error):
            self._count("broken")
        # The edge of a server: whatever a connection brings, the next one is answered.
        except Exception as error:
            self._count("failed")
            log.error("a handshake failed: %s", error, exc_info=error)
        finally:
            self._room.release()

    def _converse(self, stream: socket.socket) -> None:
        timeout_s = self._settings.dial_timeout_s
        connection = Connection(stream, self._settings.secret, self._clock, timeout_s)
        hello = connection.receive(b"hello", Hello, REQUEST_BYTES_MAX)
        nonce = self._clock.random_bytes(NONCE_BYTES)
        connection.send(b"greeting" + hello.nonce, Greeting(nonce, self._boot, self._mine))
        both = hello.nonce + nonce
        connection.receive(b"ask" + both, Ask, REQUEST_BYTES_MAX)
        self._proven(stream)
        try:
            agree(self._mine, hello.compatibility)
            if not self._ranks:
                raise IncompatibleError("transfer.not_ready", "the producer is not ready yet")
        except IncompatibleError as error:
            connection.send(b"introduction" + both, Refusal(error.message))
            raise
        connection.send(b"introduction" + both, Introduction(self._boot, self._ranks))

    def _count(self, outcome: str) -> None:
        self._metrics.count("kvferry_transfer_handshakes_served_total", outcome=outcome)


def check_addresses(settings: Settings) -> None:
    """Raises ConfigError for addresses that are unsafe or that no peer could dial."""
    is_local = _is_loopback(settings.bind_host or "127.0.0.1")
    if not settings.secret and not is_local:
        raise ConfigError(
            "transfer.secret",
            f"bind_host={settings.bind_host!r} can be reached from other machines: set a secret,"
            " or listen at 127.0.0.1",
            key="secret",
        )
    if settings.advertise_host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            "transfer.advertise_host",
            f"advertise_host={settings.advertise_host!r} is no address that a peer could dial",
            key="advertise_host",
        )
    if not is_local and _is_loopback(settings.advertise_host):
        raise ConfigError(
            "transfer.advertise_host",
            f"advertise_host={settings.advertise_host!r} leads every peer to itself: set it to this"
            " machine's address",
            key="advertise_host",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
