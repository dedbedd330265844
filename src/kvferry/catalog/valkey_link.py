"""A link to a Valkey server: calls of the library's functions, each with a deadline.

A server that does not have the library (new, restarted, another's) gets it. A connection that broke
is made again once within a call, so a function may be called twice with the same arguments: those
that must not be worked out twice get an operation id. A server that was started again, or another
at its address, is not the one that was opened: calls raise UnavailableError with kind
`catalog.lost` until the link is opened again. Any thread may call.
"""

import itertools
import re
import ssl
from collections.abc import Callable
from typing import Any

import valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    ValkeyError,
)
from valkey.exceptions import (
    TimeoutError as CallTimeoutError,
)
from valkey.retry import Retry

from kvferry.catalog.base import LOST
from kvferry.catalog.valkey_library import Library
from kvferry.clock import Clock
from kvferry.errors import ClosedError, ConfigError, UnavailableError
from kvferry.server_url import ServerUrl

CALL_S = 2.0
"""How long a call may take: the engine's runner thread waits for it."""
CONNECT_S = 1.0
POLICY = "noeviction"
DENIED = "catalog.denied"
FULL = "catalog.memory"
UNTRUSTED = "catalog.untrusted"

_DENIED = (AuthenticationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)


class Link:
    """See the module. `clock`: only for chance. Messages name the server, never the password."""

    def __init__(self, server: ServerUrl, clock: Clock, library: Library, call_s: float = CALL_S):
        self.name = server.name
        self._server = server
        self._clock = clock
        self._library = library
        self._call_s = call_s
        self._client: valkey.Valkey | None = None
        self._session = b""
        self._server_run: bytes | None = None
        self._numbers = itertools.count()

    def open(self) -> None:
        """Raises ConfigError if the server refuses us, cannot be trusted or would throw records
        away by itself, UnavailableError if it does not answer."""
        self.close()
        _check_authorities(self._server)
        self._session = self._clock.random_bytes(12)
        self._server_run = None
        self._client = _client(self._server, self._call_s, self._greet)
        try:
            policy = self.say("INFO", "memory").get("maxmemory_policy", POLICY)
        except UnavailableError as error:
            if error.kind not in (DENIED, UNTRUSTED):
                raise
            raise ConfigError(error.kind, error.message) from error
        if policy != POLICY:
            raise ConfigError(
                "catalog.maxmemory_policy",
                f"{self.name} may throw records away when its memory is full: set"
                f" maxmemory-policy to {POLICY} (it is {policy})",
            )

    def _greet(self, connection: Any) -> None:
        """Each new connection must lead to the server that was opened, in the same life of it."""
        connection.on_connect()
        connection.send_command("INFO", "server")
        run = re.search(rb"run_id:(\w+)", connection.read_response())
        if self._server_run not in (None, run and run[1]):
            raise _OtherServerError("the server was restarted, or another took its place")
        self._server_run = run and run[1]

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def operation(self) -> bytes:
        """An id that no other call has."""
        return self._session + next(self._numbers).to_bytes(8, "big")

    def call(self, function: str, root: bytes, *arguments: Any) -> Any:
        """Calls a function of the library. Raises UnavailableError."""
        command = ("FCALL", f"{self._library.name}_{function}", 1, root, *arguments)
        try:
            return self._execute(command)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise self._refused(error) from error
        self.load()
        return self.say(*command)

    def say(self, *command: Any) -> Any:
        """Any other command. Raises as `call`."""
        try:
            return self._execute(command)
        except ResponseError as error:
            raise self._refused(error) from error

    def load(self) -> None:
        """Gives the server the library, if it has not got it."""
        try:
            self._execute(("FUNCTION", "LOAD", self._library.source))
        except ResponseError as error:
            if "already exists" not in str(error):  # else: another process was quicker
                raise self._unavailable(error) from error

    def _execute(self, command: tuple[Any, ...]) -> Any:
        """A `ResponseError` is the caller's to understand."""
        try:
            return self._attempt(command)
        except CallTimeoutError as error:
            raise self._unavailable(error) from error
        except (ResponseError, UnavailableError):
            raise
        except (ValkeyError, OSError):  # the server may only have closed an idle connection
            return self._attempt_again(command)

    def _attempt_again(self, command: tuple[Any, ...]) -> Any:
        try:
            return self._attempt(command)
        except (ResponseError, UnavailableError):
            raise
        except (ValkeyError, OSError) as error:
            raise self._unavailable(error) from error

    def _attempt(self, command: tuple[Any, ...]) -> Any:
        client = self._client
        if client is None:
            raise ClosedError("catalog.closed", "the catalog is closed", server=self.name)
        try:
            return client.execute_command(*command)
        except _OtherServerError as error:
            raise UnavailableError(LOST, f"{self.name}: {error}") from None
        except _DENIED as error:
            raise UnavailableError(
                DENIED,
                f"{self.name} refuses this user or password (KVFERRY_CATALOG_PASSWORD): {error}",
            ) from None

    def _refused(self, error: ResponseError) -> UnavailableError:
        """A primary that has become a replica stays one: the next call looks for another."""
        if isinstance(error, OutOfMemoryError):
            return UnavailableError(FULL, f"{self.name}: its memory is full: raise maxmemory")
        if isinstance(error, ReadOnlyError) and self._client is not None:
            self._client.connection_pool.disconnect()
        return self._unavailable(error)

    def _unavailable(self, error: Exception) -> UnavailableError:
        if isinstance(error.__context__, ssl.SSLCertVerificationError):
            reason = error.__context__.verify_message
            return UnavailableError(
                UNTRUSTED,
                f"{self.name} cannot be trusted: {reason}; ?ca_file= in the URL names the"
                " authorities that may have signed its certificate",
            )
        return UnavailableError("catalog.server", f"{self.name}: {error or type(error).__name__}")


class _OtherServerError(ValkeyError):
    """Not the server that was opened."""


def _check_authorities(server: ServerUrl) -> None:
    if server.ca_file is not None:
        try:
            ssl.create_default_context(cafile=server.ca_file)
        except OSError as error:
            raise ConfigError(
                "catalog.ca_file",
                f"ca_file={server.ca_file} cannot be used: {error.strerror or error}; it has to be"
                " a file of certificates in PEM",
            ) from error


def _client(server: ServerUrl, call_s: float, greet: Callable[[Any], None]) -> valkey.Valkey:
    tls = {"ssl": True, "ssl_ca_certs": server.ca_file, "ssl_check_hostname": True}
    return valkey.Valkey(
        host=server.host,
        port=server.port,
        db=server.database,
        username=server.user,
        password=server.password,
        socket_timeout=call_s,
        socket_connect_timeout=min(CONNECT_S, call_s),
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        valkey_connect_func=greet,
        lib_name=None,
        lib_version=None,
        **(tls if server.is_tls else {}),
    )
