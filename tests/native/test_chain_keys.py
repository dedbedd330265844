"""Keys are a format: engines find each other's pages only if all compute the same."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import _native, keys

NAMESPACE = bytes(range(32))


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def reference(parent: bytes, tokens: list[int], chunk_tokens: int, extras: list[bytes]) -> bytes:
    chain = [parent]
    for i, extra in enumerate(extras):
        chunk = tokens[i * chunk_tokens : (i + 1) * chunk_tokens]
        chain.append(keys.chunk_key(NAMESPACE, chain[-1], chunk, extra))
    return b"".join(chain[1:])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=120),
    st.integers(1, 40),
    st.binary(min_size=32, max_size=32),
    st.data(),
)
def test_native_keys_equal_the_reference(tokens, chunk_tokens, parent, data):
    count = len(tokens) // chunk_tokens
    extras = data.draw(st.lists(st.binary(max_size=150), min_size=count, max_size=count))
    native = _native.chain_keys(NAMESPACE, parent, pack(tokens), chunk_tokens, extras)
    assert native == reference(parent, tokens, chunk_tokens, extras)


def test_a_chain_can_be_continued_from_its_last_key():
    tokens = list(range(64))
    whole = _native.chain_keys(NAMESPACE, bytes(32), pack(tokens), 16, [b""] * 4)
    rest = _native.chain_keys(NAMESPACE, whole[32:64], pack(tokens[32:]), 16, [b""] * 2)
    assert whole[64:] == rest


@pytest.mark.parametrize("length_bytes", [*range(130), 4096, 100_001])
def test_machines_without_sha_instructions_compute_the_same(length_bytes):
    data = bytes(i * 7 % 251 for i in range(length_bytes))
    assert _native.sha256_portable(data) == hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((bytes(31), bytes(32), b"", 16, []), "namespace"),
        ((bytes(32), bytes(33), b"", 16, []), "parent"),
        ((bytes(32), bytes(32), bytes(63), 16, []), "tokens"),
        ((bytes(32), bytes(32), bytes(64), 0, []), "chunk_tokens"),
        ((bytes(32), bytes(32), bytes(64), 16, []), "extras"),
        ((bytes(32), bytes(32), bytes(60), 16, [b""]), "extras"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _native.chain_keys(*arguments)
