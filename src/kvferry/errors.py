"""The errors of kvferry: the class says what the handler does, `kind` says what happened.

Misses and refusals are values, not errors (see the contracts). An exception is for what a caller
cannot plan. `kind` is an append-only code that metrics and scripts may rely on.
"""

from typing import Any


class Error(Exception):
    """Base class. `kind`: stable code; `context`: the values a reader needs to find the cause."""

    def __init__(self, kind: str, message: str, **context: Any):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.context = context

    def __str__(self) -> str:
        if not self.context:
            return f"{self.message} [{self.kind}]"
        details = ", ".join(f"{name}={value!r}" for name, value in self.context.items())
        return f"{self.message} [{self.kind}: {details}]"


class ConfigError(Error, ValueError):
    """The operator's fault, at start: the engine refuses to start. Names the key and the cure."""


class UnavailableError(Error, ConnectionError):
    """The world's fault and may pass (also at start, for a remote): a miss; opens the breaker."""


class ExhaustedError(Error):
    """No space or no buffers: the store is dropped, a request is never blocked."""


class CorruptError(Error):
    """Bytes are not what the key promised: the load is reported failed, the key quarantined."""


class IncompatibleError(Error):
    """A peer or data of another identity or version: refused, naming the fields that differ."""


class ClosedError(Error):
    """Used after close: raises in tests, logged once in production."""


class InternalError(Error, AssertionError):
    """Our bug: open records are settled first, then the connector stands aside."""
