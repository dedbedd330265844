"""Identity: namespaces and chained chunk keys.

A namespace is the digest of all that must agree for bytes to be interchangeable; a key is the
chained hash of a chunk's tokens and extra inputs inside a namespace. vLLM's own block hashes are
not used: they differ between versions, algorithms and seeds.

Both encodings are canonical, versioned and length-delimited: docs/formats.md.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence

DIGEST_BYTES = 32
TENANT_BYTES = 16
ROOT_PARENT = bytes(DIGEST_BYTES)
NAMESPACE_PREFIX = b"kvferry namespace 1\x00"
KEY_PREFIX = b"kvferry key 1\x00\x00\x00"  # 16 bytes

Scalar = str | int | bool | bytes | None
Field = Scalar | Sequence["Field"] | Mapping[str, "Field"]


def encode(value: Field) -> bytes:
    """Type tag, length, content; mappings sorted by name. Two values encode alike only if equal."""
    if value is None:
        return _delimited(b"n", b"")
    if isinstance(value, bool):
        return _delimited(b"t", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _delimited(b"i", str(value).encode())
    if isinstance(value, str):
        return _delimited(b"s", value.encode())
    if isinstance(value, bytes):
        return _delimited(b"b", value)
    if isinstance(value, Mapping):
        pairs = (encode(name) + encode(value[name]) for name in sorted(value))
        return _delimited(b"m", b"".join(pairs))
    return _delimited(b"l", b"".join(encode(item) for item in value))


def _delimited(tag: bytes, content: bytes) -> bytes:
    return tag + struct.pack("<Q", len(content)) + content


def namespace_digest(record: Mapping[str, Field]) -> bytes:
    """32 bytes that name an identity record."""
    return hashlib.sha256(NAMESPACE_PREFIX + encode(record)).digest()


def tenant_id(name: str) -> bytes:
    """16 bytes that name a tenant in headers and catalogs; zeros for no name."""
    return hashlib.sha256(name.encode()).digest()[:TENANT_BYTES] if name else bytes(TENANT_BYTES)


def encode_extras(extras: Sequence[tuple[str, bytes]]) -> bytes:
    """The extra inputs of one chunk (kind, value), in the order given; empty for none."""
    return b"".join(encode(kind) + encode(value) for kind, value in extras)


def chunk_key(namespace: bytes, parent: bytes, tokens: Sequence[int], extras: bytes = b"") -> bytes:
    """Reference of the native `chain_keys`, for one chunk. Token ids are unsigned 32-bit."""
    content = struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.sha256(
        KEY_PREFIX
        + namespace
        + parent
        + struct.pack("<I", len(tokens))
        + content
        + struct.pack("<I", len(extras))
        + extras
    ).digest()
