"""A catalog that was lost while engines run is opened again by the call that finds it out.

A server may come back empty, or with what it knew a while ago; then what the engine relied on is
void. The call that meets `catalog.lost` opens the catalog and does what follows an opening (the
store's ownership, adoption of the pages) before it goes on. If that fails, so does the call, and
the next one tries again.
"""

from collections.abc import Callable
from typing import Any

from kvferry.catalog.base import LOST, Catalog
from kvferry.errors import Error, UnavailableError
from kvferry.metric_table import CATALOG_VERBS

_WATCHED = frozenset(CATALOG_VERBS) - {"open"}


class RevivingCatalog:
    """Has all that `inner` has. One thread at a time. `revive`: opens `inner` again, and may call
    verbs."""

    def __init__(self, inner: Catalog, revive: Callable[[], None]):
        self._inner = inner
        self._revive = revive
        self._is_lost = False
        self._is_reviving = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _WATCHED or self._is_reviving:
            return found
        return self._watched(found)

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            if not self._is_lost:
                try:
                    return call(*arguments, **named)
                except UnavailableError as error:
                    if error.kind != LOST:
                        raise
            self._restore()
            return call(*arguments, **named)

        return watched

    def _restore(self) -> None:
        self._is_lost = self._is_reviving = True
        try:
            self._revive()
        except Error as error:
            raise UnavailableError(
                LOST, f"the catalog was lost, and cannot be opened again yet: {error.message}"
            ) from error
        finally:
            self._is_reviving = False
        self._is_lost = False
