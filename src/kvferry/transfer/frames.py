"""Sealed frames: how anything that crosses between engines shows that it comes from one of ours.

    magic "kvfx" | version | 3 bytes zero | HMAC-SHA-256, 32 bytes | body, msgpack

The code covers magic, version, the context and the body. The context says where a frame belongs
(which direction, which boot, which handshake), so that it is worth nothing anywhere else. Bodies
are typed structs; nothing else is ever decoded, and nothing before its code has been checked.
"""

import hashlib
import hmac
from typing import Any, TypeVar

import msgspec

from kvferry.errors import IncompatibleError

MAGIC = b"kvfx"
VERSION = 1
"""1: the first."""
CODE_BYTES = 32
HEAD_BYTES = len(MAGIC) + 4 + CODE_BYTES

T = TypeVar("T")


def seal(secret: bytes, context: bytes, body: msgspec.Struct) -> bytes:
    """`body` as a frame that is good in `context` only."""
    head = MAGIC + bytes((VERSION, 0, 0, 0))
    content = msgspec.msgpack.encode(body)
    return head + _code(secret, head, context, content) + content


def unseal(secret: bytes, context: bytes, frame: bytes, body_type: Any, bytes_max: int) -> Any:
    """The body of a frame, of `body_type` (a struct or a union of tagged structs). Raises
    IncompatibleError with kind `frame.size`, `frame.foreign`, `frame.version`, `frame.forged` or
    `frame.malformed`."""
    if not HEAD_BYTES <= len(frame) <= bytes_max:
        raise IncompatibleError("frame.size", "a frame of this size is not expected")
    head, content = frame[: len(MAGIC) + 4], frame[HEAD_BYTES:]
    if head[: len(MAGIC)] != MAGIC:
        raise IncompatibleError("frame.foreign", "this is no frame of ours")
    if head[len(MAGIC)] != VERSION:
        raise IncompatibleError(
            "frame.version", f"a frame of version {head[len(MAGIC)]}; this is version {VERSION}"
        )
    code = frame[len(head) : HEAD_BYTES]
    if not secret or not hmac.compare_digest(code, _code(secret, head, context, content)):
        raise IncompatibleError(
            "frame.forged", "the code of a frame is wrong: is the secret equal?"
        )
    try:
        return msgspec.msgpack.decode(content, type=body_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IncompatibleError("frame.malformed", f"a frame's body is wrong: {error}") from error


def _code(secret: bytes, head: bytes, context: bytes, content: bytes) -> bytes:
    label = head + len(context).to_bytes(4, "little") + context
    return hmac.new(secret, label + content, hashlib.sha256).digest()
