"""A store that exists, opened beside the engines that may be using it; never made, never owned."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.catalog import open as catalog_open
from kvferry.catalog.base import Catalog
from kvferry.clock import SystemClock
from kvferry.config import Config, split_url
from kvferry.errors import ConfigError, UnavailableError
from kvferry.pages import open as pages_open
from kvferry.pages.base import PageStore, StoreFacts
from kvferry.pages.facts import Asked
from kvferry.pages.segments import Superblock, known_roots, read_superblock
from kvferry.server_url import is_server, shown

PREFIX_DIGITS_MIN = 8
NO_CATALOG = (
    "no catalog on this host: no engine here has used the store as this user, or the engines name"
    " one: give it with --catalog"
)


@dataclass(frozen=True)
class OpenedStore:
    """`catalog` None: there is none on this host. `catalog_url`: without a password."""

    pages: PageStore
    facts: StoreFacts
    catalog: Catalog | None
    catalog_url: str


def existing_root(config: Config) -> tuple[Path, Superblock]:
    """The folder of a store. Raises UnavailableError if there is no store."""
    root = pages_open.require_path(config.home)
    if root is None:
        raise ConfigError(
            "cli.memory", "memory: is gone with its process; name a posix:// or usrbio:// store"
        )
    try:
        superblock = read_superblock(root)
    except OSError as error:
        raise UnavailableError(
            "cli.store",
            f"{root}: {error.strerror}: give user {os.geteuid()} the folder, or run this as the"
            " user of the engines",
        ) from error
    if superblock is None:
        raise UnavailableError(
            "cli.no_store",
            f"there is no store in {root}: an engine makes it when it starts; name the folder that"
            " the engine's setting pages names",
        )
    return root, superblock


@contextmanager
def open_store(config: Config, *, may_make: bool = False) -> Iterator[OpenedStore]:
    """Opens pages and, where there is one, catalog; closes both. `may_make`: makes the catalog
    where there is none. Raises kvferry's errors."""
    home, superblock = existing_root(config)
    facts = superblock.facts()
    _require_all_roots(home, config)
    pages = pages_open.open_roots(
        config.roots,
        SystemClock(),
        Asked(),
        is_guest=True,
        direct_io=config.direct_io,
        write_thread_count=1,
        usrbio_library=config.usrbio_library,
    )
    catalog = None
    try:
        catalog = open_catalog(config, facts, may_make=may_make)
        yield OpenedStore(pages, facts, catalog, shown(config.catalog_url(facts.store_id)))
    finally:
        if catalog is not None:
            catalog.close()
        pages.close()


def _require_all_roots(home: Path, config: Config) -> None:
    """Pages on a root that is not named would be taken for lost. Raises ConfigError."""
    named = [str(pages_open.require_path(url)) for url in config.roots]
    missing = sorted(known_roots(home).difference(named))
    if missing:
        raise ConfigError(
            "cli.roots", f"the store has more roots: name it as {','.join([*named, *missing])}"
        )


def open_catalog(config: Config, facts: StoreFacts, *, may_make: bool = False) -> Catalog | None:
    """Only one that is there already, if not told otherwise: looking at a store makes none. The
    caller closes it. None: there is none on this host, and none was named."""
    url = config.catalog_url(facts.store_id)
    scheme, path = split_url(url)
    is_there = is_server(url) or (scheme == "lmdb" and Path(path, "data.mdb").exists())
    if not is_there and not may_make:
        if config.catalog is not None:
            raise UnavailableError("cli.no_catalog", f"there is no catalog in {url}: name another")
        return None
    catalog = catalog_open.open_url(url, SystemClock(), is_guest=not may_make)
    try:
        catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
    except BaseException:
        catalog.close()
        raise
    return catalog


def named_namespace(store: OpenedStore, prefix: str) -> bytes:
    """The one namespace of a store whose hexadecimal digits begin so. Raises ConfigError."""
    known = {facts.namespace for facts in store.pages.segments()}
    if store.catalog is not None:
        known |= {space.namespace for space in store.catalog.stats().spaces}
    found = [namespace for namespace in known if namespace.hex().startswith(prefix.lower())]
    if len(prefix) >= PREFIX_DIGITS_MIN and len(found) == 1:
        return found[0]
    names = ", ".join(namespace.hex()[:12] for namespace in sorted(known)) or "none"
    raise ConfigError(
        "cli.namespace",
        f"--namespace {prefix!r} must be the first {PREFIX_DIGITS_MIN} digits or more of one"
        f" namespace; there are: {names}",
    )
