"""Several engines share a catalog on Valkey; any of them, and the server, may be killed."""

import os

import pytest

from kvferry.catalog.open import open_url
from kvferry.catalog.snapshot import check_invariants
from tests.catalog.crowd import CLOCK, Crowd, check_rest, live_together
from tests.catalog.slot_worker import (
    CAPACITY_BYTES,
    GRACE_S,
    SEGMENT_BYTES,
    SEGMENTS_MAX,
    STORE,
)


def test_no_slot_has_two_owners_whoever_is_killed(tmp_path, empty_server):
    live_together(tmp_path, empty_server.url.name, seed=1, kill_count=6)


def server_dies(folder, server, kill_count, worker_count=3):
    catalog = open_url(server.url.name, CLOCK, GRACE_S)
    catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    crowd = Crowd(folder, server.url.name, seed=1, count=worker_count)
    for _ in range(kill_count):
        CLOCK.sleep(0.4)
        server.kill()
        server.start()
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        assert check_invariants(catalog.snapshot()) == []
        assert len(os.listdir(folder / "segments")) <= SEGMENTS_MAX
    CLOCK.sleep(2.0)
    crowd.kill_all()
    wrong = {line for line in crowd.said if not line.startswith("unavailable")}
    assert wrong == set()
    assert any("catalog.lost" in line for line in crowd.said), "nobody noticed"
    check_rest(catalog, count_min=10)
    catalog.close()


def test_no_slot_has_two_owners_when_the_server_is_killed(tmp_path, server):
    server_dies(tmp_path, server, kill_count=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_no_slot_ever_has_two_owners(tmp_path, empty_server, seed):
    live_together(tmp_path, empty_server.url.name, seed, kill_count=100, count=8)


@pytest.mark.slow
def test_no_slot_ever_has_two_owners_whatever_the_server_does(tmp_path, server):
    server_dies(tmp_path, server, kill_count=30, worker_count=8)
