"""A server whose answers make no sense is one that does not answer.

Whatever is at its address may say anything, and records may vanish from it by an operator's hand.
That is the world's fault: without this, an engine took it for a bug of its own, and stood aside
for good.
"""

import struct
from collections.abc import Callable
from typing import Any

from kvferry.catalog.base import Catalog
from kvferry.errors import Error, UnavailableError
from kvferry.metric_table import CATALOG_VERBS

_NOT_UNDERSTOOD = (AttributeError, LookupError, TypeError, ValueError, struct.error)
_WATCHED = frozenset(CATALOG_VERBS)


class UnderstoodCatalog:
    """Has all that `inner` has, a client of a server. Any thread."""

    def __init__(self, inner: Catalog):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _watched(found) if name in _WATCHED else found


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except Error:
            raise
        except _NOT_UNDERSTOOD as error:
            reason = f"the server's answer makes no sense: {error!r}"
            raise UnavailableError("catalog.answer", reason) from error

    return watched
