"""The server of the catalog comes back with less than it knew, while two engines use the store:
each finds the pages again before it reserves, and both stay one owner."""

from functools import partial

import msgspec
import pytest

pytest.importorskip("kvferry._native", reason="posix pages need the native extension")

from kvferry.catalog.base import LOST, Commit
from kvferry.catalog.runner import Runner, TicketState
from kvferry.clock import SystemClock
from kvferry.config import decode
from kvferry.errors import UnavailableError
from kvferry.layout import Address
from kvferry.metrics import Metrics
from kvferry.offload import build
from kvferry.offload.build import Backends, _Tenure
from kvferry.offload.space.room import space_of
from kvferry.testing.staging import Driver, page_id
from kvferry.testing.valkey import ServerProcess
from tests.offload.parts import make_part

PART = make_part()
CLOCK = SystemClock()
PATIENCE_S = 60.0


class Engine:
    """What both halves of an engine open, without vLLM."""

    def __init__(self, config):
        self.backends = Backends(config, CLOCK, Metrics())
        self.tenure = _Tenure(config, CLOCK, self.backends)
        self.backends.start(self.tenure.begin)
        self.backends.runner.periodic(self.tenure.beat, 0.1)

    def say(self, verb, *arguments):
        """One call of the catalog, on the runner's thread; an error is an answer."""
        ticket = self.backends.runner.submit(
            lambda: getattr(self.backends.catalog, verb)(*arguments), PATIENCE_S
        )
        while ticket.state(CLOCK.now_s()) is TicketState.PENDING:
            CLOCK.sleep(0.002)
        if ticket.state(CLOCK.now_s()) in (TicketState.LATE, TicketState.REFUSED):
            return UnavailableError("test.refused", "the breaker is open")
        return ticket.error or ticket.value

    def close(self):
        self.backends.close()


@pytest.fixture
def server(tmp_path):
    server = ServerProcess(tmp_path / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def engines(tmp_path, server, monkeypatch):
    monkeypatch.setattr(build, "OWNER_LEASE_S", 2.0)
    monkeypatch.setattr(build, "Runner", partial(Runner, backoff_s=0.1, backoff_max_s=0.5))
    options = {
        "pages": f"posix://{tmp_path}/kv",
        "catalog": server.url.name,
        "capacity_bytes": 1 << 22,
        "segment_bytes": 1 << 18,
    }
    engines = [Engine(decode(options)) for _ in range(2)]
    yield engines
    for engine in engines:
        engine.close()


def store_page(engine) -> bytes:
    """Stores one page; returns its key."""
    backends = engine.backends
    engine.say("attach", space_of(PART, backends.facts))
    segment = engine.say("grow", PART.namespace)
    backends.pages.create_segment(segment, PART.namespace, PART.geometry)
    assert engine.say("grown", segment)
    (slot,) = engine.say("reserve", PART.namespace, 1, 60.0)
    number = int.from_bytes(slot.generation, "big")
    page = page_id("a", generation=number, namespace=PART.namespace)
    driver = Driver(backends.pages, PART.geometry)
    assert driver.write(page, slot.address).outcome.value == "ok"
    count = PART.geometry.slice_count
    engine.say("commit", PART.namespace, [Commit(page.key, page.parent, 0, slot, 0, count)])
    return page.key


def until(ask, is_enough):
    """The first answer that is."""
    give_up_s = CLOCK.now_s() + PATIENCE_S
    while not is_enough(answer := ask()):
        assert CLOCK.now_s() < give_up_s, answer
        CLOCK.sleep(0.05)
    return answer


def found(engine, key: bytes) -> list:
    """The hit, as soon as the catalog can be had again."""
    return until(
        lambda: engine.say("lookup", PART.namespace, [key]), lambda said: isinstance(said, list)
    )


def owner(root) -> dict:
    return msgspec.json.decode(max(root.glob("owner.*")).read_bytes())


def test_a_server_that_comes_back_empty(engines, server, tmp_path):
    key = store_page(engines[0])
    before = owner(tmp_path / "kv")["catalog_id"]
    server.kill()
    assert isinstance(engines[0].say("lookup", PART.namespace, [key]), UnavailableError)
    server.forget()
    server.start()

    for engine in engines:
        (hit,) = found(engine, key)
        assert hit is not None, "the page was not found again before the catalog was used"
        assert hit.address == Address(0, hit.address.slot)
    names = {engine.backends.catalog.catalog_id.hex() for engine in engines}
    CLOCK.sleep(0.5)  # both beat in the new term
    term = owner(tmp_path / "kv")

    assert names == {term["catalog_id"]} != {before}
    assert len(term["beats"]) == 2
    assert [engine.tenure.is_held for engine in engines] == [True, True]
    assert engines[1].say("grow", PART.namespace) == 1, "a number that is taken is given out again"
    losses = [e.backends.metrics.value("kvferry_catalog_losses_total") for e in engines]
    assert min(losses) >= 1


def test_nothing_is_reserved_until_the_pages_were_found(engines, server):
    key = store_page(engines[0])
    can_read = [False]

    def slow(scan, segment):
        if not can_read[0]:
            raise UnavailableError("test.scan", "the store does not answer")
        return scan(segment)

    for engine in engines:
        pages = engine.backends.pages
        pages.scan = partial(slow, pages.scan)
    server.kill()
    server.forget()
    server.start()
    error = until(
        lambda: engines[0].say("reserve", PART.namespace, 1, 60.0),
        lambda said: isinstance(said, list) or "the store does not answer" in str(said),
    )
    assert isinstance(error, UnavailableError), "slots were given out that may hold pages"
    assert error.kind == LOST
    assert not engines[0].tenure.is_held
    can_read[0] = True
    assert found(engines[0], key)[0] is not None
    assert engines[0].tenure.is_held
