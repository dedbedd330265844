"""The fault wrapper: a test that relies on a fault which does not happen proves nothing."""

from collections import Counter

import pytest

from kvferry.errors import ExhaustedError, UnavailableError
from kvferry.layout import Address
from kvferry.pages.base import Outcome
from kvferry.testing.clock import ManualClock
from kvferry.testing.faults import Fault, FaultyPages
from kvferry.testing.pages import ASKED, GEOMETRY, HOME, NAMESPACE, PageStoreSuite
from kvferry.testing.places import MemoryPlace
from kvferry.testing.staging import Driver, page_id

PAGE = page_id("a")
SLOW = pytest.mark.slow


class FaultyPlace:
    """A place whose stores have faults at these rates; none by default."""

    def __init__(self, inner, clock: ManualClock, **rates: float):
        self._inner = inner
        self.clock = clock
        self.digest = inner.digest
        self.rates = {Fault(name): rate for name, rate in rates.items()}
        self.stores: list[FaultyPages] = []

    def store(self, asked=ASKED) -> FaultyPages:
        inner = self._inner.store(asked)
        store = FaultyPages(inner, self, self.clock, self.clock.chance, self.rates, late_s_max=1.0)
        self.stores.append(store)
        return store

    def page(self, address: Address) -> bytes:
        return self._inner.page(address)

    def replace_page(self, address: Address, content: bytes) -> None:
        self._inner.replace_page(address, content)


def on_memory(seed: int = 0, **rates: float) -> FaultyPlace:
    clock = ManualClock(seed)
    return FaultyPlace(MemoryPlace(clock), clock, **rates)


@pytest.fixture(params=["memory", "usrbio"])
def faulty(request):
    """Makes a faulty place on this backend, of a seed and rates."""
    if request.param == "memory":
        yield on_memory
    else:
        yield from _on_usrbio(request.getfixturevalue("emulation"))


@pytest.fixture
def faulty_usrbio(emulation):
    yield from _on_usrbio(emulation)


def _on_usrbio(emulation):
    usrbio_place = pytest.importorskip("tests.pages.usrbio_place")
    places: list[FaultyPlace] = []

    def make(seed: int = 0, **rates: float) -> FaultyPlace:
        clock = ManualClock(seed)
        place = usrbio_place.PatientPlace(emulation, clock, f"store {len(places)}")
        places.append(FaultyPlace(place, clock, **rates))
        return places[-1]

    yield make
    for store in [store for place in places for store in place.stores]:
        store.release()
        store.close()
    assert emulation.left_over() == []


class TestWithoutFaults(PageStoreSuite):
    """The wrapper itself keeps the contract."""

    @pytest.fixture
    def place(self, faulty):
        return faulty()


def _driver(place: FaultyPlace) -> Driver:
    store = place.store()
    store.open()
    store.inner.create_segment(HOME.segment, NAMESPACE, GEOMETRY)
    return Driver(store, GEOMETRY)


def _written(place: FaultyPlace) -> Driver:
    """A driver on a page that was written before the faults began."""
    driver = _driver(place)
    driver.store.rates = {}
    assert driver.write(PAGE, HOME).outcome is Outcome.OK
    driver.store.rates = dict(place.rates)
    return driver


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("short", Outcome.SHORT),
        ("flip_returned", Outcome.CORRUPT),
        ("io_error", Outcome.IO_ERROR),
        ("duplicate", Outcome.OK),
        ("late", Outcome.OK),
    ],
)
def test_read_faults(faulty, fault, outcome):
    driver = _written(faulty(**{fault: 1.0}))
    read = driver.read(PAGE, HOME)
    assert read.result.outcome is outcome
    right = driver.expected(driver.extent(PAGE, HOME))
    assert (read.payloads == right) == (outcome is Outcome.OK)
    assert driver.store.fired == Counter({Fault(fault): 1})


@pytest.mark.parametrize(
    ("fault", "says", "later"),
    [
        ("flip_stored", Outcome.OK, Outcome.CORRUPT),
        ("torn", Outcome.OK, None),
        ("no_space", Outcome.NO_SPACE, Outcome.ABSENT),
        ("duplicate", Outcome.OK, Outcome.OK),
        ("late", Outcome.OK, Outcome.OK),
    ],
)
def test_write_faults(faulty, fault, says, later):
    driver = _driver(faulty(**{fault: 1.0}))
    assert driver.write(PAGE, HOME).outcome is says
    assert driver.store.fired[Fault(fault)] == 1
    driver.store.rates = {}
    outcome = driver.read(PAGE, HOME).result.outcome
    assert outcome is later if later else outcome is not Outcome.OK


def test_a_failed_write_may_have_happened(faulty):
    seen = set()
    for seed in range(20):
        driver = _driver(faulty(seed, io_error=1.0))
        assert driver.write(PAGE, HOME).outcome is Outcome.IO_ERROR
        driver.store.rates = {}
        seen.add(driver.read(PAGE, HOME).result.outcome)
    assert seen == {Outcome.OK, Outcome.ABSENT}


def test_a_late_read_writes_to_its_buffer_late(faulty):
    """Or only its result is late: both happen."""
    seen = set()
    for seed in range(20):
        place = faulty(seed, late=1.0)
        driver = _written(place)
        extent = driver.extent(PAGE, HOME)
        driver.spoil(extent)
        driver.store.submit_reads([extent])
        polls = 0
        while not (results := driver.store.poll()):
            polls += 1
            seen.add(driver.payloads(extent) == driver.expected(extent))
            place.clock.advance(0.3)
        assert results[0].outcome is Outcome.OK and polls > 0
        assert driver.payloads(extent) == driver.expected(extent)
    assert seen == {True, False}


def test_a_lost_write_is_there_but_nobody_hears_of_it(faulty):
    driver = _driver(faulty(lost=1.0))
    extent = driver.extent(PAGE, HOME)
    driver.fill(extent)
    driver.store.submit_writes([extent])
    assert [driver.store.poll() for _ in range(50)] == [[]] * 50
    driver.store.rates = {}
    assert driver.read(PAGE, HOME).result.outcome is Outcome.OK


def test_a_duplicated_write_comes_back_over_a_later_page(faulty):
    driver = _driver(faulty(duplicate=1.0))
    driver.write(PAGE, HOME)
    driver.store.rates = {}
    newer = page_id("b")
    assert driver.write(newer, HOME).outcome is Outcome.OK
    for _ in range(10):
        driver.store.poll()
    assert driver.read(newer, HOME).result.outcome is Outcome.FOREIGN


def test_a_hang_holds_everything_until_it_is_released(faulty):
    place = faulty(hang=1.0)
    driver = _written(place)
    job = driver.store.submit_reads([driver.extent(PAGE, HOME)])
    before_s = place.clock.now_s()
    assert driver.store.wait(2.0) == [] and place.clock.now_s() == before_s + 2.0
    with pytest.raises(UnavailableError):
        driver.store.segments()
    assert driver.store.fired[Fault.HANG] == 1
    driver.store.release()
    assert driver.one_result(job).outcome is Outcome.OK


def test_a_full_disk_takes_no_segment(faulty):
    store = faulty(no_space=1.0).store()
    store.open()
    with pytest.raises(ExhaustedError):
        store.create_segment(1, NAMESPACE, GEOMETRY)
    assert store.segments() == [] and store.fired[Fault.NO_SPACE] == 1


ALL_FAULTS = {fault.value: 0.08 for fault in Fault}


@pytest.mark.parametrize("seed", range(60))
def test_under_all_faults_ok_means_the_right_bytes_and_no_result_comes_twice(seed):
    _do_anything(on_memory(seed, **ALL_FAULTS))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=SLOW) for n in range(6, 60))])
def test_so_they_do_on_3fs_in_disorder(emulation, faulty_usrbio, seed):
    emulation.configure(seed=seed, reorder=1, fewer=1, implicit=0.3, delay_us=200)
    _do_anything(faulty_usrbio(seed, **ALL_FAULTS))


def _do_anything(place: FaultyPlace) -> None:
    driver = _driver(place)
    store, chance = driver.store, place.clock.chance
    pages = [page_id(str(n), generation) for n in range(3) for generation in range(2)]
    positions = list(range(4))
    open_operations = {}
    for step in range(150):
        if step == 120:
            store.rates = {}
        store.release()
        if positions:
            extent = driver.extent(
                chance.choice(pages), Address(1, chance.randrange(2)), None, positions.pop()
            )
            is_write = chance.random() < 0.5
            (driver.fill if is_write else driver.spoil)(extent)
            submit = store.submit_writes if is_write else store.submit_reads
            open_operations[submit([extent])] = (extent, is_write)
        place.clock.advance(0.1)
        for result in store.poll():
            extent, is_write = open_operations.pop(result.job)
            if result.outcome is Outcome.OK and not is_write:
                assert driver.payloads(extent) == driver.expected(extent)
            position = (extent.buffer_address - driver.buffer.address) // GEOMETRY.page_bytes
            positions.append(position)
    assert len(open_operations) == store.fired[Fault.LOST]
    assert sum(store.fired.values()) > 0
