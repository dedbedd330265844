"""What a producer gives its client to carry to a consumer: signed, and worth nothing if changed.

A client is not trusted. It can only carry `kv_transfer_params` or not; what it writes itself is
ignored. The record says where the producer is, which transfer it is, and which tokens are covered,
as namespace digest and chained key: a consumer that gets another key from its own request (other
text, salt, adapter or image) computes everything itself.

It holds no time. A record ends with its lease, on the producer's own clock.

Where the producer pushes, a router that has the secret can bring both engines together before there
is such a record: by an appointment, which both get at once and which says nothing about tokens.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from kvferry.errors import IncompatibleError
from kvferry.transfer.frames import seal, unseal

FIELD = "kvferry_transfer"
APPOINTMENT_FIELD = "kvferry_push"
CONTEXT = b"kv_transfer_params"
APPOINTMENT_CONTEXT = b"kv_transfer_params, appointment"
RECORD_BYTES_MAX = 2048
ID_BYTES = 16


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """One finished prefill. `transfer`: 16 random bytes, never used again. `boot`: 16 random bytes
    of the producer's process. `key`: of the first `token_count` tokens, `keys.chunk_key`."""

    transfer: bytes
    boot: bytes
    host: str
    port: int
    namespace: bytes
    key: bytes
    token_count: int


def wants_remote_decode(params: Any) -> bool:
    """Whether a client asks a producer to keep the blocks."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def mint(secret: bytes, offer: Offer) -> dict[str, Any]:
    """`kv_transfer_params` of the producer's answer."""
    record = base64.urlsafe_b64encode(seal(secret, CONTEXT, offer)).decode()
    return {"do_remote_prefill": True, "do_remote_decode": False, FIELD: record}


def appoint(secret: bytes, offer: Offer, transfer: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """`kv_transfer_params` for the producer of an earlier `offer` and for a consumer, for the same
    request. `transfer`: ID_BYTES random bytes, never used before."""
    record = replace(offer, transfer=transfer, key=b"", token_count=0)
    frame = base64.urlsafe_b64encode(seal(secret, APPOINTMENT_CONTEXT, record)).decode()
    return (
        {"do_remote_prefill": False, "do_remote_decode": True, APPOINTMENT_FIELD: frame},
        {"do_remote_prefill": True, "do_remote_decode": False, APPOINTMENT_FIELD: frame},
    )


def read(secret: bytes, params: Any) -> tuple[Offer | None, str]:
    """The offer that a request carries, or None and why: `absent`, `unsigned` (somebody made it
    himself), `forged`, `malformed`. Never raises, whatever a client sends."""
    if not isinstance(params, Mapping) or not params:
        return None, "absent"
    record = params.get(FIELD)
    if record is None:
        return None, "unsigned" if params.get("do_remote_prefill") else "absent"
    offer, reason = _unseal(secret, CONTEXT, record)
    if offer is not None and offer.token_count < 1:
        return None, "malformed"
    return offer, reason


def read_appointment(secret: bytes, params: Any) -> tuple[Offer | None, str]:
    """As `read`: an offer without key and tokens, which whoever gets it knows himself."""
    if not isinstance(params, Mapping) or APPOINTMENT_FIELD not in params:
        return None, "absent"
    return _unseal(secret, APPOINTMENT_CONTEXT, params[APPOINTMENT_FIELD])


def _unseal(secret: bytes, context: bytes, record: Any) -> tuple[Offer | None, str]:
    if not isinstance(record, str) or len(record) > RECORD_BYTES_MAX:
        return None, "malformed"
    try:
        frame = base64.b64decode(record.encode("ascii"), altchars=b"-_", validate=True)
        offer = unseal(secret, context, frame, Offer, RECORD_BYTES_MAX)
    except (UnicodeEncodeError, binascii.Error):
        return None, "malformed"
    except IncompatibleError as error:
        return None, "malformed" if error.kind == "frame.malformed" else "forged"
    if base64.urlsafe_b64encode(frame).decode() != record:
        return None, "malformed"
    if len(offer.transfer) != ID_BYTES or len(offer.boot) != ID_BYTES:
        return None, "malformed"
    return offer, ""
