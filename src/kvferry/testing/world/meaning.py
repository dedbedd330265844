"""What bytes must be. The content of a block is a function of the weights and of all tokens up to
the last one written to it; so the content of a page is a function of its key.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvferry.keys import DIGEST_BYTES, ROOT_PARENT, chunk_key
from kvferry.offload.base import Part
from kvferry.testing.world.shape import BLOCK_TOKENS, CONTENT_BYTES, Model

FIRST_WEIGHTS = b"first weights"


def root_digest(extras: bytes) -> bytes:
    """Stands for no tokens."""
    return hashlib.blake2b(extras, digest_size=16).digest()


def next_digest(digest: bytes, token: int) -> bytes:
    """Stands for all tokens so far and one more."""
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()


def block_content(weights: bytes, part_number: int, digest: bytes, length_bytes: int) -> bytes:
    """All heads and layers of one block of one part: head after head, layer after layer."""
    return hashlib.blake2b(
        digest + part_number.to_bytes(1, "little"), digest_size=length_bytes, key=weights
    ).digest()


class Meanings:
    """Knows of each key which tokens it stands for, and of each namespace which weights: it is
    the hasher of all planners, so it sees every key that is made."""

    def __init__(self, model: Model):
        self.parts = model.parts()
        self._block_bytes = [model.groups[part.group_index].block_bytes for part in self.parts]
        self._chunks: dict[bytes, tuple[bytes, bytes, bytes]] = {}
        self._digests: dict[bytes, tuple[bytes, ...]] = {}
        self._spaces = {
            part.namespace: (FIRST_WEIGHTS, number) for number, part in enumerate(self.parts)
        }

    def hasher(
        self,
        namespace: bytes,
        parent: bytes,
        tokens: bytes,
        chunk_tokens: int,
        extras: Sequence[bytes],
    ) -> bytes:
        """As `_native.chain_keys`."""
        keys, width = [], 4 * chunk_tokens
        for index, extra in enumerate(extras):
            content = tokens[index * width : (index + 1) * width]
            key = chunk_key(namespace, parent, struct.unpack(f"<{chunk_tokens}I", content), extra)
            self._chunks[key] = (parent, content, extra)
            keys.append(key)
            parent = key
        return b"".join(keys)

    def name(self, namespace: bytes, part: Part, weights: bytes) -> None:
        """An engine with these weights calls a part by this namespace from now on."""
        number = next(
            number
            for number, known in enumerate(self.parts)
            if (known.stage, known.group_index) == (part.stage, part.group_index)
        )
        self._spaces.setdefault(namespace, (weights, number))

    def weights_of(self, namespace: bytes) -> bytes:
        return self._spaces[namespace][0]

    def payload(self, namespace: bytes, key: bytes, slice_index: int) -> bytes:
        """What a slice of the page of this key must hold, without padding."""
        weights, number = self._spaces[namespace]
        length_bytes = self._block_bytes[number]
        blocks = [
            block_content(weights, number, digest, length_bytes)
            for digest in self._block_digests(key)
        ]
        layer_count = length_bytes // self.parts[number].slice_count // CONTENT_BYTES
        starts = [
            (slice_index * layer_count + layer) * CONTENT_BYTES for layer in range(layer_count)
        ]
        return b"".join(block[at : at + CONTENT_BYTES] for at in starts for block in blocks)

    def _block_digests(self, key: bytes) -> tuple[bytes, ...]:
        """The digest at the end of each block of a chunk."""
        if key not in self._digests:
            assert len(key) == DIGEST_BYTES
            parent, tokens, extra = self._chunks[key]
            is_first = parent == ROOT_PARENT
            digest = root_digest(extra) if is_first else self._block_digests(parent)[-1]
            ends = []
            for position, (token,) in enumerate(struct.iter_unpack("<I", tokens), 1):
                digest = next_digest(digest, token)
                if position % BLOCK_TOKENS == 0:
                    ends.append(digest)
            self._digests[key] = tuple(ends)
        return self._digests[key]
