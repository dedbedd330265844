"""URLs of servers: `valkey://[user[:password]@]host[:port][/database]`, `valkeys://` with TLS.

A URL may hold a password, so no message shows one as it was given: `shown` is what people see.
"""

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from kvferry.errors import ConfigError

SCHEMES = ("valkey", "valkeys")
FORM = "valkey://[user:password@]host:port[/database]"
DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where a server is, and as whom to speak to it. `user`, `password` None: not named.
    `ca_file` None: the system's certificate authorities."""

    host: str
    port: int
    database: int
    is_tls: bool
    user: str | None
    password: str | None = field(repr=False)
    ca_file: str | None

    @property
    def name(self) -> str:
        """For people: without user and password."""
        scheme = "valkeys" if self.is_tls else "valkey"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.database}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_server(url: str) -> bool:
    return url.partition(":")[0] in SCHEMES


def shown(url: str) -> str:
    """A URL without the password that may be in it, whatever else is wrong with it."""
    return re.sub(r"(?s)(?<=//).*(?=@)", _hidden, url)


def _hidden(match: re.Match) -> str:
    user, colon, _ = match[0].partition(":")
    return f"{user}:***" if colon else user


def parse(url: str) -> ServerUrl:
    """Raises ConfigError, without the password, if it is not of this form."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
        database = int(parts.path.strip("/") or 0)
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise _wrong(url) from None
    unknown = set(options) - {"ca_file"} if parts.scheme == "valkeys" else set(options)
    if parts.scheme not in SCHEMES or not parts.hostname or unknown or parts.fragment:
        raise _wrong(url)
    return ServerUrl(
        parts.hostname,
        port,
        database,
        parts.scheme == "valkeys",
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        options.get("ca_file", [None])[0],
    )


def _wrong(url: str) -> ConfigError:
    return ConfigError(
        "catalog.url", f"{shown(url)!r} is not of the form {FORM}; with TLS valkeys://"
    )
