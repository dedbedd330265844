"""A checker that finds nothing wrong with anything would let all other tests pass."""

from dataclasses import replace

import pytest

from kvferry.catalog.snapshot import (
    PageEntry,
    ReservedEntry,
    SegmentEntry,
    SegmentState,
    Snapshot,
    check_invariants,
)
from kvferry.layout import Address

A, B = b"a" * 32, b"b" * 32
PARENT, CHILD = b"p" * 32, b"c" * 32
ROOT = bytes(32)

READY = SegmentEntry(A, SegmentState.READY, 0.0, slot_count=5)
PARENT_PAGE = PageEntry(Address(0, 2), b"1" * 16, age=7, chunk_index=0, parent=ROOT, uses=1)
CHILD_PAGE = PageEntry(Address(0, 3), b"2" * 16, age=7, chunk_index=1, parent=PARENT, uses=1)
SOUND = Snapshot(
    capacity_bytes=2000,
    segment_bytes=1000,
    namespaces=frozenset({A, B}),
    segments={0: READY, 1: SegmentEntry(B, SegmentState.CREATING, 0.0, slot_count=2)},
    free=frozenset({Address(0, 0)}),
    reserved={Address(0, 1): ReservedEntry(b"3" * 16, 1.0, None, frozenset())},
    graced={Address(0, 4): 1.0},
    pages={(A, PARENT): PARENT_PAGE, (A, CHILD): CHILD_PAGE},
    recalls={},
)


def test_nothing_is_wrong_with_what_is_sound():
    assert check_invariants(SOUND) == []


def pages(**changes):
    return {**SOUND.pages, (A, CHILD): replace(CHILD_PAGE, **changes)}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"capacity_bytes": 1999}, "bytes of 1999"),
        ({"namespaces": frozenset({A})}, "unknown namespace"),
        ({"free": frozenset({Address(0, 0), Address(0, 1)})}, "2 owners"),
        ({"graced": {Address(0, 4): 1.0, Address(0, 2): 1.0}}, "2 owners"),
        ({"pages": pages(address=Address(0, 2))}, "2 owners"),
        ({"pages": pages(address=Address(0, 5))}, "not a slot"),
        ({"pages": pages(address=Address(9, 0))}, "not a slot"),
        ({"graced": {}}, "5 slots, 4 known"),
        ({"free": frozenset({Address(0, 0), Address(1, 0)})}, "CREATING and has free"),
        (
            {
                "segments": {
                    **SOUND.segments,
                    0: replace(READY, state=SegmentState.EMPTIED),
                }
            },
            "EMPTIED and has free slots or pages",
        ),
        ({"segments": {**SOUND.segments, 0: replace(READY, namespace=B)}}, "another namespace"),
        ({"pages": pages(age=8)}, "younger than its parent"),
    ],
)
def test_each_contradiction_is_said(broken, said):
    assert any(said in words for words in check_invariants(replace(SOUND, **broken)))
