"""What an engine has told of the store, as a router believes it."""

from collections.abc import Iterable
from typing import NamedTuple

from kvferry.keys import ROOT_PARENT
from kvferry.offload.base import Part, Request
from kvferry.offload.scheduler.announcer import Words
from kvferry.offload.scheduler.lookup import chunk_keys
from kvferry.testing.world.checks import Failed
from kvferry.testing.world.storage import Storage


class _Word(NamedTuple):
    is_stored: bool
    namespace: bytes
    key: bytes


class Told:
    """Of one engine, by name. The engine's own thread."""

    def __init__(self, name: str, storage: Storage):
        self._name = name
        self._storage = storage
        self._keys: set[tuple[bytes, bytes]] = set()

    def describe(self, request: Request, part: Part, chunk_index: int) -> Words:
        hasher = self._storage.meanings.hasher
        keys = chunk_keys(hasher, part, request, ROOT_PARENT, 0, chunk_index + 1)
        return Words(*(_Word(told, part.namespace, keys[-32:]) for told in (True, False)))

    def hear(self, words: Iterable[_Word]) -> None:
        for word in words:
            page = (word.namespace, word.key)
            if (page in self._keys) is word.is_stored:
                raise Failed("a", f"{self._name} tells {word} twice")
            if word.is_stored:
                self._keys.add(page)
            else:
                self._keys.remove(page)

    def check(self) -> None:
        """At rest: what was told to be stored is there."""
        for namespace, key in self._keys:
            if self._storage.catalog.present(namespace, [key]) != [True]:
                raise Failed("a", f"{self._name} has told of a page that is gone")
