"""From a URL to an open page store."""

import difflib
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from kvferry.clock import Clock
from kvferry.config import split_url
from kvferry.errors import ConfigError
from kvferry.pages.base import PageStore, StoreFacts
from kvferry.pages.facts import Asked
from kvferry.pages.memory import Medium, MemoryPages
from kvferry.pages.segments import ROOTS, known_roots, remember_roots
from kvferry.pages.spread import Root, SpreadPages

log = logging.getLogger(__name__)

FORMS = {
    "posix": "posix:///absolute/path",
    "usrbio": "usrbio:///absolute/path",
    "memory": "memory:",
}
_CLASSES = {"posix": "PosixPages", "usrbio": "UsrbioPages"}


def open_roots(
    urls: Sequence[str], clock: Clock, asked: Asked, *, is_guest: bool = False, **options: Any
) -> PageStore:
    """The store over these roots, the home first, open; options and errors: as `open_url`. A root
    of the store that is not among them is out. `is_guest`: makes no root, and remembers none."""
    home = require_path(urls[0])
    missing = _not_named(home, urls) if home is not None else []
    if len(urls) == 1 and not missing:
        return open_url(urls[0], clock, asked, **options)
    for root in missing:
        log.error(
            "the root %s of the store is out: `pages` does not name it. If it is gone for good,"
            " take it out of %s while no engine runs",
            root,
            home / ROOTS,
        )

    def others(facts: StoreFacts) -> list[tuple[str, Root]]:
        known, made = known_roots(home), []
        for url in urls[1:]:
            further = Asked(
                facts.capacity_bytes,
                facts.alignment_bytes,
                facts.segment_bytes,
                store_id=facts.store_id,
                may_create=not is_guest and str(require_path(url)) not in known,
            )
            made.append((url, _make(url, clock, further, **options)))
        return made

    first = urls[0], _make(urls[0], clock, asked, **options)
    store = SpreadPages(first, others, clock, missing)
    store.open()
    if not is_guest:
        remember_roots(home, [str(require_path(url)) for url in store.names()[1:]], clock)
    return store


def _not_named(home: Path, urls: Sequence[str]) -> list[str]:
    """Further roots of the store, other than these."""
    named = {require_path(url).resolve() for url in urls}
    return sorted(root for root in known_roots(home) if Path(root).resolve() not in named)


def open_url(url: str, clock: Clock, asked: Asked, **options: Any) -> PageStore:
    """The store that a URL names, open: `posix:///path`, `usrbio:///path`, or `memory:`, which is a
    new one each time. Raises ConfigError for any other, and what `PageStore.open` raises; there is
    no fallback from one backend to another. Options: `direct_io` for `posix` alone,
    `usrbio_library` for `usrbio`, `read_thread_count` and `write_thread_count`."""
    store = _make(url, clock, asked, **options)
    store.open()
    return store


def _make(
    url: str,
    clock: Clock,
    asked: Asked,
    *,
    direct_io: Literal["auto", "on", "off"] = "auto",
    read_thread_count: int | None = None,
    write_thread_count: int | None = None,
    usrbio_library: str | None = None,
) -> Root:
    """Not open."""
    path = require_path(url)
    scheme = split_url(url).scheme
    if path is None:
        return MemoryPages(Medium(), clock, asked)
    own = {"direct_io": direct_io} if scheme == "posix" else {"library": usrbio_library}
    return _native_class(scheme)(
        path,
        clock,
        asked,
        read_thread_count=read_thread_count,
        write_thread_count=write_thread_count,
        **own,
    )


def require_path(url: str) -> Path | None:
    """The folder of a posix or usrbio URL; None for `memory:`. Raises ConfigError for any other
    URL."""
    scheme, path = split_url(url)
    if url == "memory:":
        return None
    if scheme in _CLASSES and url.startswith(f"{scheme}:///") and path.strip("/"):
        return Path(path)
    near = difflib.get_close_matches(scheme, FORMS, n=1, cutoff=0.5)
    forms = [FORMS[name] for name in near] or list(FORMS.values())
    raise ConfigError(
        "pages.url", f"{url!r} names no page store: did you mean {' or '.join(forms)}?", url=url
    )


def _native_class(scheme: str) -> type:
    """`memory:` works without the native extension."""
    try:
        module = importlib.import_module(f"kvferry.pages.{scheme}")
    except ImportError as error:
        raise ConfigError(
            "pages.native",
            f"{scheme} pages need the native extension, which does not load ({error}): install "
            "kvferry again, with a C++ compiler at hand or from a wheel",
        ) from error
    return getattr(module, _CLASSES[scheme])
