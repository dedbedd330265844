"""Records on disk are what version 3 says, byte by byte; tables that disagree are noticed."""

import pytest

from kvferry.catalog import lmdb_records as records
from kvferry.catalog.base import PACKED_HIT, Share, Space
from kvferry.catalog.eviction import Head, Recall
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.quotas import QuotaRow
from kvferry.catalog.snapshot import SegmentState
from kvferry.catalog.sweeping import SegmentHeat
from kvferry.errors import CorruptError
from kvferry.layout import Address
from kvferry.testing.catalog import CAPACITY_BYTES, SEGMENT_BYTES, STORE, A, Driver, chain
from kvferry.testing.clock import ManualClock

META = records.Meta(b"c" * 16, b"s" * 16, 3, 4, b"b" * 16, 0.5, 1.5, 5, 6, 7, *range(8, 17))
SPACE = records.SpaceRow(1, Space(b"n" * 32, 2, 3, 4, 5, "text"), 1.0, Recall(0.5, 8, 9))
RESERVED = records.ReservedRow(b"g" * 16, 2.0, b"k" * 32, 0b101)
PAGE = records.PageRow(1, 2, b"g" * 16, 3, 4, b"p" * 32, 5)
QUOTA = QuotaRow(1, 2, 0.5, 1.5)
TIMER = records.Timer(2.0, records.GRACE, 1, 2)
HEAT = SegmentHeat(9, Share(b"n" * 32, b"t" * 16), SegmentState.EMPTIED, 1.0, 2, 3, 4, 5, 6)

GOLDEN = {
    "meta": (
        META.pack(),
        "00000003" + "63" * 16 + "73" * 16 + "00" * 7 + "03" + "00" * 7 + "04" + "62" * 16
        # offset, last, next segment, next space, next share, counters
        + "3fe0000000000000" + "3ff8000000000000" + "00000005" + "00000006" + "00000007"
        + "".join(f"{count:016x}" for count in range(8, 17)),
    ),
    "space": (
        SPACE.pack(),
        "00000001" "00000002" "0000000000000003" "00000004" "00000005" "3ff0000000000000"
        "3fe0000000000000" "00000008" "00000009" "74657874",
    ),
    "segment": (
        records.pack_segment(HEAT),
        "6e" * 32 + "74" * 16 + "03" "3ff0000000000000" "00000002" "00000003" "00000004" "00000005"
        "0000000000000006",
    ),
    "reserved": (RESERVED.pack(), "52" + "67" * 16 + "4000000000000000" + "6b" * 32 + "05"),
    "published": (records.pack_published(b"k" * 32), "50" + "6b" * 32),
    "page": (
        PAGE.pack(),
        "01000000" "02000000" + "67" * 16 + "03000000" "04000000" + "70" * 32 + "05",
    ),
    "quota": (
        records.pack_quota(QUOTA),
        "00000001" "00000002" "3fe0000000000000" "3ff8000000000000",
    ),
    "timer": (TIMER.pack(), "4000000000000000" "02" "00000001" "00000002"),
    "free": (records.free_key(7, Address(1, 2)), "00000007" "00000001" "00000002"),
    "cold": (
        records.cold_key(7, PAGE),
        "00000007" "02" "00000003" "fffffffb" "00000001" "00000002",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_records_are_those_of_version_3(name):
    packed, expected = GOLDEN[name]
    assert packed.hex() == expected


def test_records_come_back_as_they_were():
    assert records.Meta.unpack(META.pack()) == META
    assert records.SpaceRow.unpack(b"n" * 32, SPACE.pack()) == SPACE
    assert records.ReservedRow.unpack(RESERVED.pack()) == RESERVED
    assert records.ReservedRow.unpack(records.pack_published(b"k" * 32)) is None
    assert records.PageRow.unpack(PAGE.pack()) == PAGE
    assert records.Timer.unpack(TIMER.pack()) == TIMER
    assert records.unpack_quota(records.pack_quota(QUOTA)) == QUOTA
    assert records.unpack_segment(9, records.pack_segment(HEAT)) == HEAT
    assert records.unpack_cold(records.cold_key(7, PAGE)) == Head(3, 4, Address(1, 2))
    assert records.packed_hit(PAGE.pack()) == PACKED_HIT.pack(1, 2, b"g" * 16)
    assert records.packed_age(PAGE.pack()) == records.pack_age(3)
    assert records.packed_age(records.ABSENT_PAGE) == records.NO_AGE
    assert len(records.ABSENT_PAGE) == len(PAGE.pack())


def spoil_page(tables):
    key, _ = tables.pages.first()
    tables.pages.delete(key)


def spoil_order(tables):
    tables.cold.put(tables.cold.first()[0][:-1] + b"\x07")


def spoil_timer(tables):
    tables.timers.delete(tables.timers.first()[0])


def spoil_free(tables):
    key, _ = tables.free.first()
    tables.free.put(b"\0\0\0\x09" + key[4:])


def spoil_figures(tables):
    key, packed = tables.segments.first()
    heat = records.unpack_segment(0, packed)
    heat.age_sum += 1
    tables.segments.put(key, records.pack_segment(heat))


@pytest.mark.parametrize("spoil", [spoil_page, spoil_order, spoil_timer, spoil_free, spoil_figures])
def test_tables_that_disagree_are_noticed(tmp_path, spoil):
    """Else `kvferry check` would call a catalog sound whose next eviction goes wrong."""
    catalog = LmdbCatalog(tmp_path, ManualClock())
    catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    catalog.attach(A)
    driver = Driver(catalog, catalog._clock)
    driver.grow(A)
    driver.store(chain("x", 2))
    driver.reserve(1)
    catalog.snapshot()
    catalog._environment.write(spoil)
    with pytest.raises(CorruptError, match=r"catalog\.inconsistent"):
        catalog.snapshot()
    catalog.close()
