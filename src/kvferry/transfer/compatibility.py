"""Whether two engines may exchange KV cache: a record that both sides and people can read.

Fields are compared one by one, so that a refusal says what differs. The protocol is a range of
versions and a set of capabilities, so that engines of two releases work together while a
deployment is upgraded.
"""

from collections.abc import Mapping
from enum import IntFlag

import msgspec

from kvferry.errors import IncompatibleError

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
"""1: claims, grants, releases; pull. Also invitations, stops and answers, between engines whose
`direction` is `push`: others never meet them."""
UNSAID = {"direction": "pull"}
"""What a record means that lacks a field which came later."""


class Capability(IntFlag):
    """What an engine can do beyond the first version. Bits are never used again."""

    NONE = 0


class Compatibility(msgspec.Struct, frozen=True):
    """`fields`: all that must be equal for the bytes to mean the same (model, weights, KV dtype and
    scales, content order, ...), by name."""

    fields: dict[str, str | int | bool]
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    capabilities: int = int(Capability.NONE)


def compatibility_of(fields: Mapping[str, str | int | bool], direction: str) -> Compatibility:
    """Of an engine of this release. What goes without saying is not said, for those that do not
    know the field."""
    said = {} if direction == UNSAID["direction"] else {"direction": direction}
    return Compatibility({**fields, **said})


class Agreement(msgspec.Struct, frozen=True):
    """What two engines have in common."""

    protocol: int
    capabilities: int


def agree(mine: Compatibility, theirs: Compatibility) -> Agreement:
    """Raises IncompatibleError that names all fields that differ, with both values."""
    protocol = min(mine.protocol_max, theirs.protocol_max)
    if protocol < max(mine.protocol_min, theirs.protocol_min):
        raise IncompatibleError(
            "transfer.protocol",
            f"the peer speaks protocol {theirs.protocol_min} to {theirs.protocol_max}, we speak"
            f" {mine.protocol_min} to {mine.protocol_max}",
        )
    names = mine.fields.keys() | theirs.fields.keys()
    differing = {
        name: (_said(mine, name), _said(theirs, name))
        for name in sorted(names)
        if mine.fields.get(name) != theirs.fields.get(name)
    }
    if differing:
        words = ", ".join(
            f"{name}: {ours!r}, not {other!r}" for name, (ours, other) in differing.items()
        )
        raise IncompatibleError("transfer.fields", f"the peer is another engine ({words})")
    return Agreement(protocol, mine.capabilities & theirs.capabilities)


def _said(record: Compatibility, name: str) -> str | int | bool | None:
    return record.fields.get(name, UNSAID.get(name))
