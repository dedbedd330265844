"""Staging: a slot that is out twice is two requests' bytes in one place."""

import ctypes
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.device.staging import Staging
from kvferry.errors import ConfigError, InternalError


@pytest.fixture
def staging():
    staging = Staging(8 * 4096, 4096)
    staging.open()
    yield staging
    staging.close()


def take_all(take):
    return list(iter(take, None))


def test_slots_are_page_aligned_and_apart(staging):
    slots = sorted(take_all(staging.take_for_load))
    assert len(slots) == staging.slot_count == 8
    assert all(slot % 4096 == 0 for slot in slots)
    assert all(b - a == staging.slot_bytes for a, b in pairwise(slots))
    assert slots[0] == staging.address


def test_slots_are_memory(staging):
    slots = take_all(staging.take_for_load)
    for number, slot in enumerate(slots):
        ctypes.memset(slot, number, staging.slot_bytes)
    contents = [ctypes.string_at(slot, staging.slot_bytes) for slot in slots]
    assert contents == [bytes([number]) * staging.slot_bytes for number in range(8)]


def test_odd_sizes_are_rounded_up_to_what_storage_takes():
    assert Staging(1 << 20, 5000).slot_bytes == 8192


def test_stores_leave_slots_for_loads(staging):
    stores = take_all(staging.take_for_store)
    assert len(stores) == 6
    assert len(take_all(staging.take_for_load)) == 2


def test_what_was_given_back_is_free_for_both(staging):
    for slot in take_all(staging.take_for_load):
        staging.give_back(slot)
    assert staging.taken_count == 0
    assert len(take_all(staging.take_for_store)) == 6


def test_a_slot_is_given_back_once(staging):
    slot = staging.take_for_load()
    staging.give_back(slot)
    with pytest.raises(InternalError):
        staging.give_back(slot)
    with pytest.raises(InternalError):
        staging.give_back(slot + 1)


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(ConfigError, match=r"staging_bytes.*at least 8192"):
        Staging(4096, 4096)


def test_nothing_is_handed_out_after_close(staging):
    out = staging.take_for_load()
    staging.close()
    staging.close()
    assert staging.take_for_load() is None
    ctypes.memset(out, 1, staging.slot_bytes)  # an operation that hangs may still write there


class StagingMachine(RuleBasedStateMachine):
    """Against a plain set of what is out."""

    @initialize(count=st.integers(2, 9))
    def open(self, count):
        self.staging = Staging(count * 4096, 4096)
        self.staging.open()
        self.out: set[int] = set()

    @rule(for_load=st.booleans())
    def take(self, for_load):
        left = self.staging.slot_count - len(self.out)
        kept = 0 if for_load else self.staging.kept_for_loads
        slot = self.staging.take_for_load() if for_load else self.staging.take_for_store()
        assert (slot is None) == (left <= kept)
        assert slot not in self.out
        if slot is not None:
            self.out.add(slot)

    @rule(data=st.data())
    def give_back(self, data):
        if self.out:
            slot = data.draw(st.sampled_from(sorted(self.out)))
            self.out.remove(slot)
            self.staging.give_back(slot)

    @invariant()
    def counts(self):
        if hasattr(self, "out"):
            assert self.staging.taken_count == len(self.out)


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=50, deadline=None)
