"""From a URL to an open page store."""

import difflib
from pathlib import Path
from typing import Literal

from kvferry.clock import Clock
from kvferry.config import split_url
from kvferry.errors import ConfigError
from kvferry.pages.base import PageStore
from kvferry.pages.facts import Asked
from kvferry.pages.memory import Medium, MemoryPages

FORMS = {"posix": "posix:///absolute/path", "memory": "memory:"}


def open_url(
    url: str,
    clock: Clock,
    asked: Asked,
    *,
    direct_io: Literal["auto", "on", "off"] = "auto",
    read_thread_count: int | None = None,
    write_thread_count: int | None = None,
) -> PageStore:
    """The store that a URL names, open: `posix:///path`, or `memory:`, which is a new one each
    time. Raises ConfigError for any other, and what `PageStore.open` raises; there is no fallback
    from one backend to another. The options are those of `posix`."""
    path = require_path(url)
    if path is None:
        store = MemoryPages(Medium(), clock, asked)
    else:
        store = _posix_class()(
            path,
            clock,
            asked,
            direct_io=direct_io,
            read_thread_count=read_thread_count,
            write_thread_count=write_thread_count,
        )
    store.open()
    return store


def require_path(url: str) -> Path | None:
    """The folder of a posix URL; None for `memory:`. Raises ConfigError for any other URL."""
    scheme, path = split_url(url)
    if url == "memory:":
        return None
    if scheme == "posix" and url.startswith("posix:///") and path.strip("/"):
        return Path(path)
    near = difflib.get_close_matches(scheme, FORMS, n=1, cutoff=0.5)
    forms = [FORMS[name] for name in near] or list(FORMS.values())
    raise ConfigError(
        "pages.url", f"{url!r} names no page store: did you mean {' or '.join(forms)}?", url=url
    )


def _posix_class():
    try:
        from kvferry.pages.posix import PosixPages  # noqa: PLC0415 - `memory:` works without
    except ImportError as error:
        raise ConfigError(
            "pages.native",
            f"posix pages need the native extension, which does not load ({error}): install "
            "kvferry again, with a C++ compiler at hand or from a wheel",
        ) from error
    return PosixPages
