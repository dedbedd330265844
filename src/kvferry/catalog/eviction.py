"""Which page of a namespace goes first: the policies, the same in every catalog.

Every page knows the step of its last use (its age) and how often it was used, at most once a step.
By uses it belongs to one of a few classes, and each class is kept in order of (age, -chunk index).
A policy only says which class's coldest page goes, so both keep the same records:

- `lru`: the lowest age of all.
- `adaptive`: a page of class c lives 1 + c * reach times as long without use as one that was used
  once. `reach` learns from ghosts, small marks of pages evicted lately: when a page comes back that
  had been used once, `reach` falls, when one comes back that had been used again, it rises. A page
  that comes back keeps its uses. So a scan goes quickly, and a crowd that returns is kept.

A child is neither younger than its parent nor in a higher class (docs/design/0010 has the one
exception), so whatever `reach` is, leaves go before what they hang on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.catalog.base import CLASS_COUNT, USES_MAX, Policy
from kvferry.layout import Address

REACH_MIN, REACH_FIRST, REACH_MAX = 0.125, 0.5, 8.0
REACH_GAIN = 4.0
"""How much one ghost of a store of one slot changes `reach`; n slots: 1/n of it."""
GHOSTS_PER_SLOT = 2
BUCKET_GHOSTS = 64
GHOST_BYTES = 5  # four of the key, one of uses


class Head(NamedTuple):
    """The coldest page of a class."""

    age: int
    chunk_index: int
    address: Address


class Recall(NamedTuple):
    """What a namespace has learned. `once`, `again`: ghosts of pages used once, and more often."""

    reach: float = REACH_FIRST
    once: int = 0
    again: int = 0


def use_class(uses: int) -> int:
    return min(CLASS_COUNT, uses.bit_length()) - 1


def more_uses(uses: int) -> int:
    return min(USES_MAX, uses + 1)


def victim(policy: Policy, heads: Sequence[Head | None], age: int, reach: float) -> Head | None:
    """What goes first of `heads`, one for each class. `age`: the present step."""
    first = heads[0]
    once_lives = age - first.age if first and policy is Policy.ADAPTIVE else 0

    def order(pair: tuple[int, Head]) -> tuple[float, int, Address]:
        use, head = pair
        return head.age + reach * once_lives * use, -head.chunk_index, head.address

    present = [(use, head) for use, head in enumerate(heads) if head is not None]
    return min(present, key=order)[1] if present else None


# Ghosts. They lie in buckets, each of which forgets its oldest.


def bucket_of(key: bytes, slots_max: int) -> int:
    """`slots_max`: how many slots the namespace had if the store were its alone."""
    count = max(1, GHOSTS_PER_SLOT * slots_max // BUCKET_GHOSTS)
    return int.from_bytes(key[:4], "little") % count


def remembered(recall: Recall, bucket: bytes, key: bytes, uses: int) -> tuple[Recall, bytes]:
    """After a page was evicted to make room."""
    bucket += key[4:8] + bytes([uses])
    recall = _counted(recall, uses, 1)
    if len(bucket) > BUCKET_GHOSTS * GHOST_BYTES:
        recall = _counted(recall, bucket[GHOST_BYTES - 1], -1)
        bucket = bucket[GHOST_BYTES:]
    return recall, bucket


def returned(
    recall: Recall, bucket: bytes, key: bytes, slots_max: int
) -> tuple[Recall, bytes, int]:
    """When a page is published: also the uses that it had when it was evicted, 0 if unknown."""
    at = bucket.find(key[4:8])
    while at >= 0 and at % GHOST_BYTES:
        at = bucket.find(key[4:8], at + 1)
    if at < 0:
        return recall, bucket, 0
    uses = bucket[at + 4]
    recall = _learned(_counted(recall, uses, -1), uses, slots_max)
    return recall, bucket[:at] + bucket[at + GHOST_BYTES :], uses


def _counted(recall: Recall, uses: int, by: int) -> Recall:
    if uses > 1:
        return recall._replace(again=recall.again + by)
    return recall._replace(once=recall.once + by)


def _learned(recall: Recall, uses: int, slots_max: int) -> Recall:
    """A ghost of the rarer kind counts for as many of the other kind as there are to one."""
    mine, other = (recall.again, recall.once) if uses > 1 else (recall.once, recall.again)
    factor = 1 + REACH_GAIN / slots_max * max(1.0, other / max(1, mine))
    reach = recall.reach * factor if uses > 1 else recall.reach / factor
    return recall._replace(reach=min(REACH_MAX, max(REACH_MIN, reach)))
