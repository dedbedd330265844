"""From a URL to a catalog."""

import difflib
from pathlib import Path

from kvferry.catalog.base import GRACE_S, Catalog
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.memory import MemoryCatalog
from kvferry.clock import Clock
from kvferry.config import split_url
from kvferry.errors import ConfigError

FORMS = {"lmdb": "lmdb:///absolute/path", "memory": "memory:"}


def open_url(url: str, clock: Clock, grace_s: float = GRACE_S) -> Catalog:
    """The catalog that a URL names, not open yet: its `open` needs what the store's superblock
    says. `memory:` is a new one each time. Raises ConfigError for any other URL."""
    scheme, path = split_url(url)
    if url == "memory:":
        return MemoryCatalog(clock, grace_s)
    if scheme == "lmdb" and url.startswith("lmdb:///") and path.strip("/"):
        return LmdbCatalog(Path(path), clock, grace_s)
    if scheme == "valkey":
        raise ConfigError(
            "catalog.url", f"{url!r}: valkey is not in this version; use {FORMS['lmdb']}", url=url
        )
    near = difflib.get_close_matches(scheme, FORMS, n=1, cutoff=0.5)
    forms = [FORMS[name] for name in near] or list(FORMS.values())
    raise ConfigError(
        "catalog.url", f"{url!r} names no catalog: did you mean {' or '.join(forms)}?", url=url
    )
