"""What the operator gives tenants and namespaces of a store: `limits.json` in its home.

The file is the truth (docs/formats.md). Catalogs have a copy: whoever opens the store tells it, and
so does `kvferry limit`. It appears and changes as a whole.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvferry.clock import Clock
from kvferry.errors import ConfigError
from kvferry.layout import round_up
from kvferry.pages import files
from kvferry.pages.base import StoreFacts

LIMITS = "limits.json"
VERSION = 1  # 1: the first


class Limit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one tenant, by name, or of one namespace, by its 64 hex digits; neither: of everybody,
    who has a `ttl_s` alone. `maximum_bytes` None: none but the capacity. `ttl_s`: pages that were
    not used for so long are evicted; 0: they are not."""

    tenant: str | None = None
    namespace: str | None = None
    guaranteed_bytes: int = 0
    maximum_bytes: int | None = None
    ttl_s: float = 0.0

    @property
    def owner(self) -> str:
        """For messages."""
        if self.tenant is None and self.namespace is None:
            return "everybody"
        return (
            f"tenant {self.tenant!r}" if self.namespace is None else f"namespace {self.namespace}"
        )


class _Content(msgspec.Struct, frozen=True):
    version: int
    limits: list[Limit]


def read_limits(home: Path) -> list[Limit]:
    """Raises ConfigError if the file is damaged, and as `files.system_errors` says."""
    path = home / LIMITS
    with files.system_errors("read", path):
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:
            raise ConfigError(
                "pages.limits",
                f"{path} is damaged: delete it, and set the limits again with `kvferry limit`",
                reason=str(error),
            ) from error
    if content.version != VERSION:
        raise ConfigError(
            "pages.limits_version",
            f"{path} is of version {content.version}, this kvferry knows {VERSION}: upgrade it",
        )
    return content.limits


def write_limits(home: Path, limits: Sequence[Limit], facts: StoreFacts, clock: Clock) -> None:
    """Replaces all limits. Raises ConfigError if the store cannot keep them, and as
    `files.system_errors` says."""
    check_limits(limits, facts)
    with files.system_errors("write", home / LIMITS):
        content = msgspec.json.encode(_Content(VERSION, list(limits)))
        files.replace_file(home / LIMITS, msgspec.json.format(content, indent=1) + b"\n", clock)


def check_limits(limits: Sequence[Limit], facts: StoreFacts) -> None:
    """Raises ConfigError if a store of this capacity cannot keep them."""
    for limit in limits:
        guaranteed_count, maximum_count = segment_counts(limit, facts)
        if maximum_count is not None and maximum_count < max(1, guaranteed_count):
            raise ConfigError(
                "pages.limit",
                f"the maximum of {limit.owner} must hold what it is guaranteed, and one segment at"
                " least: both are of whole segments",
                maximum_bytes=limit.maximum_bytes,
                guaranteed_bytes=limit.guaranteed_bytes,
                segment_bytes=facts.segment_bytes,
            )
    total_bytes = sum(segment_counts(limit, facts)[0] for limit in limits) * facts.segment_bytes
    if total_bytes > facts.capacity_bytes:
        raise ConfigError(
            "pages.guarantees",
            f"{total_bytes} bytes are guaranteed, in whole segments of {facts.segment_bytes}, and"
            f" the store has {facts.capacity_bytes}: guarantee less with `kvferry limit`, or make"
            " the store larger with `kvferry resize`",
        )


def segment_counts(limit: Limit, facts: StoreFacts) -> tuple[int, int | None]:
    """What is guaranteed, rounded up, and the maximum, rounded down, in whole segments."""
    guaranteed_bytes = round_up(limit.guaranteed_bytes, facts.segment_bytes)
    maximum = limit.maximum_bytes
    return (
        guaranteed_bytes // facts.segment_bytes,
        None if maximum is None else maximum // facts.segment_bytes,
    )
