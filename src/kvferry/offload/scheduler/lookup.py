"""One lookup: hash a request's tokens, ask the catalog. Runs on the runner thread.

All that grows with the length of a prompt happens here, so that the scheduler thread only slices
what came out.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvferry.catalog.base import Catalog
from kvferry.clock import Clock
from kvferry.keys import DIGEST_BYTES, ROOT_PARENT
from kvferry.offload.base import SLOT, Part, Request
from kvferry.offload.chunks import runs_of

ABSENT_SLOT = bytes(SLOT.size)
PIECE_CHUNKS = 64
"""So many chunks are gone through at a time."""
REST_S = 50e-6
"""Between two pieces the thread sleeps. LMDB lets go of the interpreter at each key and takes it
back before the engine's thread, which waits for it, is awake. With pieces in a row that went on for
up to 5 ms, until the interpreter itself forces a change (`docs/design/0007`)."""

Hasher = Callable[[bytes, bytes, bytes, int, Sequence[bytes]], bytes]
"""`_native.chain_keys` or a reference of it."""


class PartAnswer:
    """What one part has of a prompt: three columns over its full chunks.

    `keys`: 32 bytes each; `slots`: 24 bytes each, zeros for a miss. `hits`: the chunks that are
    there; `hit_by_key`: the same by their keys; `runs`: where they lie.
    """

    def __init__(self, keys: bytes, slots: bytes, hit_by_key: dict[bytes, int]):
        self.keys = keys
        self.slots = slots
        self.hit_by_key = hit_by_key
        self.hits = frozenset(hit_by_key.values())
        self.runs = runs_of(self.hits, len(self))

    def __len__(self) -> int:
        return len(self.keys) // DIGEST_BYTES

    def key(self, chunk_index: int) -> bytes:
        return self.keys[chunk_index * DIGEST_BYTES : (chunk_index + 1) * DIGEST_BYTES]

    def without(self, chunk_indices: Sequence[int]) -> "PartAnswer":
        """The same answer with these chunks as misses."""
        if not chunk_indices:
            return self
        slots, hit_by_key = bytearray(self.slots), dict(self.hit_by_key)
        for index in chunk_indices:
            slots[index * SLOT.size : (index + 1) * SLOT.size] = ABSENT_SLOT
            del hit_by_key[self.key(index)]
        return PartAnswer(self.keys, bytes(slots), hit_by_key)


def pieces(end_chunk: int, clock: Clock) -> Iterator[range]:
    """The chunks [0, end_chunk) in pieces, with a rest between two. The runner's thread."""
    for first in range(0, end_chunk, PIECE_CHUNKS):
        if first:
            clock.sleep(REST_S)
        yield range(first, min(first + PIECE_CHUNKS, end_chunk))


def chunk_keys(
    hasher: Hasher, part: Part, request: Request, parent: bytes, first_chunk: int, end_chunk: int
) -> bytes:
    """Keys of the chunks [first_chunk, end_chunk), 32 bytes each."""
    size = part.chunk_tokens
    tokens = array("I", request.tokens[first_chunk * size : end_chunk * size]).tobytes()
    extras = [request.extras(i * size, (i + 1) * size) for i in range(first_chunk, end_chunk)]
    return hasher(part.namespace, parent, tokens, size, extras)


class Lookup:
    """Made on the scheduler thread, run once on the runner thread. `names`, the keys of each part,
    is set as soon as they are known, also when the catalog then fails or answers too late."""

    def __init__(
        self,
        catalog: Catalog,
        hasher: Hasher,
        clock: Clock,
        parts: Sequence[Part],
        request: Request,
    ):
        self._catalog = catalog
        self._hasher = hasher
        self._clock = clock
        self.parts = parts
        self._request = request
        self.token_count = len(request.tokens)
        self.names: tuple[list[bytes], ...] | None = None

    def run(self) -> tuple[PartAnswer, ...]:
        """What there is; answers without chunks, and no `names`, if nothing names the request."""
        if not self._request.name():
            return tuple(PartAnswer(b"", b"", {}) for _ in self.parts)
        names = [self._hash(part) for part in self.parts]
        self.names = tuple(map(list, names))  # whoever takes them makes them longer
        return tuple(self._ask(*pair) for pair in zip(self.parts, names, strict=True))

    def _hash(self, part: Part) -> list[bytes]:
        names: list[bytes] = []
        end_chunk, parent = self.token_count // part.chunk_tokens, ROOT_PARENT
        for piece in pieces(end_chunk, self._clock):
            keys = chunk_keys(self._hasher, part, self._request, parent, piece.start, piece.stop)
            names += rows(keys, DIGEST_BYTES)
            parent = names[-1]
        return names

    def _ask(self, part: Part, names: list[bytes]) -> PartAnswer:
        keys = b"".join(names)
        if not self._request.is_readable:
            return PartAnswer(keys, bytes(SLOT.size * len(names)), {})
        slots, hit_by_key = bytearray(), {}
        for piece in pieces(len(names), self._clock):
            asked = names[piece.start : piece.stop]
            found = self._catalog.lookup_packed(part.namespace, asked)
            slots += found
            for index, key, slot in zip(piece, asked, rows(found, SLOT.size), strict=True):
                if slot != ABSENT_SLOT:
                    hit_by_key[key] = index
        return PartAnswer(keys, bytes(slots), hit_by_key)


def rows(packed: bytes, row_bytes: int) -> list[bytes]:
    """Packed rows, one by one."""
    return [packed[start : start + row_bytes] for start in range(0, len(packed), row_bytes)]
