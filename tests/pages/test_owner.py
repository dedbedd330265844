"""Two catalogs that hand out the slots of one store would overwrite each other's pages."""

import pytest

from kvferry.errors import ClosedError, IncompatibleError
from kvferry.pages.owner import Census, StoreOwnership
from kvferry.testing.clock import ManualClock

LEASE_S = 10.0


class BusyClock(ManualClock):
    """While one party sleeps, the others go on."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.meanwhile = lambda: None
        self.slept_s = 0.0

    def sleep(self, duration_s: float) -> None:
        self.slept_s += duration_s
        super().sleep(duration_s)
        self.meanwhile()


@pytest.fixture
def clock():
    return BusyClock()


def _party(root, catalog_id, clock) -> StoreOwnership:
    return StoreOwnership(root, catalog_id, clock)


def test_a_store_without_owner_is_had_at_once_and_must_be_rebuilt(tmp_path, clock):
    started_s = clock.now_s()
    owner = _party(tmp_path, "a", clock)
    assert not owner.holds
    assert owner.acquire(LEASE_S) is True
    assert owner.holds and clock.now_s() == started_s


def test_processes_of_one_catalog_share_it_without_a_rebuild(tmp_path, clock):
    first, second = (_party(tmp_path, "a", clock) for _ in range(2))
    first.acquire(LEASE_S)
    assert second.acquire(LEASE_S) is False
    first.beat()
    second.beat()
    assert first.holds and second.holds


def test_a_living_owner_is_not_disturbed(tmp_path, clock):
    owner, other = _party(tmp_path, "a", clock), _party(tmp_path, "b", clock)
    owner.acquire(LEASE_S)
    clock.meanwhile = owner.beat
    with pytest.raises(IncompatibleError, match="in use by another catalog"):
        other.acquire(LEASE_S)
    owner.beat()
    assert owner.holds and not other.holds


def test_one_living_process_is_enough_to_keep_a_store(tmp_path, clock):
    dead, alive, other = (_party(tmp_path, name, clock) for name in "aab")
    dead.acquire(LEASE_S)
    alive.acquire(LEASE_S)
    clock.meanwhile = alive.beat
    with pytest.raises(IncompatibleError):
        other.acquire(LEASE_S)


def test_a_silent_owner_is_replaced_after_a_lease_and_learns_of_it(tmp_path, clock):
    owner, other = _party(tmp_path, "a", clock), _party(tmp_path, "b", clock)
    owner.acquire(LEASE_S)
    started_s = clock.now_s()
    assert other.acquire(LEASE_S) is True
    assert clock.now_s() - started_s == pytest.approx(LEASE_S)
    assert not owner.holds, "a lease has passed since its last beat"
    owner.beat()
    assert owner.lost and not owner.holds
    other.beat()
    assert other.holds


def test_who_lost_a_store_cannot_disturb_its_new_owner(tmp_path, clock):
    owner, other = _party(tmp_path, "a", clock), _party(tmp_path, "b", clock)
    owner.acquire(LEASE_S)
    other.acquire(LEASE_S)
    owner.beat()
    owner.release()
    other.beat()
    assert other.holds


def test_a_released_store_is_had_at_once(tmp_path, clock):
    owner, other = _party(tmp_path, "a", clock), _party(tmp_path, "b", clock)
    owner.acquire(LEASE_S)
    owner.release()
    owner.release()
    started_s = clock.now_s()
    assert other.acquire(LEASE_S) is True
    assert clock.now_s() == started_s
    other.release()
    assert owner.acquire(LEASE_S) is True, "another catalog had it in between"
    owner.release()
    assert owner.acquire(LEASE_S) is False, "nobody else had it in between"


def test_a_process_that_leaves_does_not_give_its_siblings_store_away(tmp_path, clock):
    leaving, staying, other = (_party(tmp_path, name, clock) for name in "aab")
    leaving.acquire(LEASE_S)
    staying.acquire(LEASE_S)
    leaving.release()
    clock.meanwhile = staying.beat
    with pytest.raises(IncompatibleError):
        other.acquire(LEASE_S)


def test_of_two_that_take_over_one_wins(tmp_path, clock):
    _party(tmp_path, "a", clock).acquire(LEASE_S)
    first, second = _party(tmp_path, "b", clock), _party(tmp_path, "c", clock)
    looks = []

    def overtake():
        looks.append(clock.now_s())
        if len(looks) == 10:
            clock.meanwhile = lambda: None
            assert first.acquire(LEASE_S) is True
            clock.meanwhile = first.beat

    clock.meanwhile = overtake
    with pytest.raises(IncompatibleError):
        second.acquire(LEASE_S)
    first.beat()
    assert first.holds and not second.holds


def test_a_silent_process_stops_by_itself(tmp_path, clock):
    owner = _party(tmp_path, "a", clock)
    owner.acquire(LEASE_S)
    clock.advance(LEASE_S)
    assert not owner.holds
    owner.beat()
    assert owner.holds, "nobody took the store"


def test_the_dead_do_not_fill_the_file(tmp_path, clock):
    for _ in range(80):
        _party(tmp_path, "a", clock).acquire(LEASE_S)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 4096


def test_a_damaged_record_is_nobodys(tmp_path, clock):
    owner = _party(tmp_path, "a", clock)
    owner.acquire(LEASE_S)
    next(tmp_path.iterdir()).write_bytes(b"\0")
    assert _party(tmp_path, "b", clock).acquire(LEASE_S) is True
    owner.beat()
    assert owner.lost


def test_beat_needs_ownership(tmp_path, clock):
    with pytest.raises(ClosedError):
        _party(tmp_path, "a", clock).beat()


def test_a_store_that_came_back_to_the_same_catalog_is_lost_to_who_slept(tmp_path, clock):
    """What the sleeper reserved before is void: the catalog was rebuilt in between."""
    sleeper, other, sibling = (_party(tmp_path, name, clock) for name in "aba")
    sleeper.acquire(LEASE_S)
    other.acquire(LEASE_S)
    other.release()
    assert sibling.acquire(LEASE_S) is True
    sleeper.beat()
    assert sleeper.lost and not sleeper.holds
    sibling.beat()
    assert sibling.holds


def test_the_dead_are_dropped(tmp_path, clock):
    """Else another catalog would wait for them, although all that live have left."""
    living, dead = (_party(tmp_path, "a", clock) for _ in range(2))
    living.acquire(LEASE_S)
    dead.acquire(LEASE_S)
    for _ in range(5):
        living.beat()
        clock.advance(LEASE_S / 4)
    living.beat()
    living.release()
    assert _party(tmp_path, "b", clock).acquire(LEASE_S) is True
    assert clock.slept_s == 0


def test_who_was_only_asleep_is_counted_again(tmp_path, clock):
    living, asleep = (_party(tmp_path, "a", clock) for _ in range(2))
    living.acquire(LEASE_S)
    asleep.acquire(LEASE_S)
    for _ in range(6):
        living.beat()
        clock.advance(LEASE_S / 4)
    asleep.beat()
    living.beat()
    living.release()
    clock.meanwhile = asleep.beat
    with pytest.raises(IncompatibleError):
        _party(tmp_path, "b", clock).acquire(LEASE_S)


def test_a_process_that_beats_is_never_dropped(tmp_path, clock):
    first, second = (_party(tmp_path, "a", clock) for _ in range(2))
    first.acquire(LEASE_S)
    second.acquire(LEASE_S)
    for _ in range(12):
        clock.advance(LEASE_S / 4)
        second.beat()
        first.beat()
    first.release()
    clock.meanwhile = second.beat
    with pytest.raises(IncompatibleError):
        _party(tmp_path, "b", clock).acquire(LEASE_S)


def test_who_uses_a_store_can_be_asked(tmp_path, clock):
    asking, owner = _party(tmp_path, "", clock), _party(tmp_path, "a", clock)
    assert asking.user(LEASE_S) is None
    owner.acquire(LEASE_S)
    clock.meanwhile = owner.beat
    assert asking.user(LEASE_S).catalog_id == "a"
    clock.meanwhile = lambda: None
    assert asking.user(LEASE_S) is None, "it was killed"
    owner.release()
    slept_s = clock.slept_s
    assert asking.user(LEASE_S) is None
    assert clock.slept_s == slept_s, "nobody had to be waited for"


def test_who_leaves_while_one_watches_does_not_make_the_dead_alive(tmp_path, clock):
    asking, dead, leaving = (_party(tmp_path, name, clock) for name in ("", "a", "a"))
    dead.acquire(LEASE_S)
    leaving.acquire(LEASE_S)
    clock.meanwhile = leaving.release
    assert asking.user(LEASE_S) is None


def test_those_who_live_are_counted_once_it_is_known(tmp_path, clock):
    """An alert on dead engines must not fire because the counting has just begun."""
    census = Census(tmp_path, clock, LEASE_S)
    assert census.count() == 0
    first, second = _party(tmp_path, "a", clock), _party(tmp_path, "a", clock)
    first.acquire(LEASE_S)
    second.acquire(LEASE_S)
    late = Census(tmp_path, clock, LEASE_S)
    assert late.count() is None
    for _ in range(4):
        clock.advance(LEASE_S / 4)
        first.beat()
        late.count()
    assert late.count() == 1, "the second never moved"
    second.beat()
    assert (late.count(), census.count()) == (2, 2)
    first.release()
    assert late.count() == 1
    clock.advance(LEASE_S)
    assert late.count() == 0
