"""From a URL to a catalog."""

import difflib
from dataclasses import replace
from pathlib import Path

from kvferry import server_url
from kvferry.catalog.base import DEFAULT_POLICY, GRACE_S, Catalog, Policy
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.understood import UnderstoodCatalog
from kvferry.clock import Clock
from kvferry.config import catalog_password, split_url
from kvferry.errors import ConfigError

FORMS = {"lmdb": "lmdb:///absolute/path", "valkey": server_url.FORM, "memory": "memory:"}


def open_url(
    url: str,
    clock: Clock,
    grace_s: float = GRACE_S,
    *,
    is_guest: bool = False,
    policy: Policy = DEFAULT_POLICY,
) -> Catalog:
    """The catalog that a URL names, not open yet: its `open` needs what the store's superblock
    says. `memory:` is a new one each time. `is_guest`: one that only opens what is there.
    `policy`: what it evicts first. Raises ConfigError for any other URL."""
    scheme, path = split_url(url)
    if url == "memory:":
        return MemoryCatalog(clock, grace_s, policy)
    if scheme == "lmdb" and url.startswith("lmdb:///") and path.strip("/"):
        return LmdbCatalog(Path(path), clock, grace_s, is_guest=is_guest, policy=policy)
    if server_url.is_server(url):
        return _on_server(url, clock, grace_s, is_guest, policy)
    near = difflib.get_close_matches(scheme, FORMS, n=1, cutoff=0.5)
    forms = [FORMS[name] for name in near] or list(FORMS.values())
    shown = server_url.shown(url)
    raise ConfigError(
        "catalog.url", f"{shown!r} names no catalog: did you mean {' or '.join(forms)}?", url=shown
    )


def _on_server(url: str, clock: Clock, grace_s: float, is_guest: bool, policy: Policy) -> Catalog:
    server = server_url.parse(url)
    if server.password is None:
        server = replace(server, password=catalog_password())
    try:
        from kvferry.catalog.valkey import ValkeyCatalog  # noqa: PLC0415 (an extra of the package)
    except ImportError as error:
        raise ConfigError(
            "catalog.client",
            "a catalog on Valkey needs its client: pip install kvferry[valkey]",
            reason=str(error),
        ) from error
    return UnderstoodCatalog(
        ValkeyCatalog(server, clock, grace_s, is_guest=is_guest, policy=policy)
    )
