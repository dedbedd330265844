"""Who clears a store must be sure that nothing comes back, and that others keep what is theirs."""

import json

import pytest

pytest.importorskip("kvferry._native", reason="posix pages need the native extension")
from typer.testing import CliRunner

from kvferry.catalog import open as catalog_open
from kvferry.catalog.base import Commit, Space, Verdict
from kvferry.cli.main import app
from kvferry.clock import SystemClock
from kvferry.layout import PageGeometry
from kvferry.metrics import Metrics
from kvferry.offload.space.recovery import recover
from kvferry.pages import open as pages_open
from kvferry.pages.base import slot_count
from kvferry.pages.facts import Asked
from kvferry.testing.staging import Driver, page_id
from kvferry.testing.valkey import ServerProcess

GEOMETRY = PageGeometry(slice_count=2, payload_bytes=5000, chunk_tokens=16)
CLOCK = SystemClock()
MINE, OTHER = b"m" * 32, b"o" * 32
MINE_PAGES, OTHER_PAGES = 30, 3


class Filled:
    """A store with two namespaces, open beside whoever clears it, as an engine has it."""

    def __init__(self, folder, url):
        self.root, self.url = folder / "kv", url
        self.pages = pages_open.open_url(
            f"posix://{self.root}", CLOCK, Asked(1 << 22, 4096, 1 << 18)
        )
        self.facts = self.pages.open()
        self.catalog = catalog_open.open_url(self.url, CLOCK)
        self.catalog.open(self.facts.store_id, self.facts.capacity_bytes, self.facts.segment_bytes)
        self._driver = Driver(self.pages, GEOMETRY)
        for namespace, count in ((MINE, MINE_PAGES), (OTHER, OTHER_PAGES)):
            self.catalog.attach(self._space(namespace))
            for index in range(count):
                assert self.store(namespace, index) is Verdict.PUBLISHED

    def _space(self, namespace):
        slot_bytes = GEOMETRY.slot_bytes(self.facts.alignment_bytes)
        return Space(namespace, slot_count(self.facts, GEOMETRY), slot_bytes, 2, 16, "{}")

    def reserve(self, namespace):
        while not (slots := self.catalog.reserve(namespace, 1, lease_s=60.0)):
            segment = self.catalog.grow(namespace)
            self.pages.create_segment(segment, namespace, GEOMETRY)
            self.catalog.grown(segment)
        return slots[0]

    def store(self, namespace, index):
        slot = self.reserve(namespace)
        page = page_id(f"page {index}", int.from_bytes(slot.generation, "big"), namespace)
        assert self._driver.write(page, slot.address).outcome.value == "ok"
        return self.commit(namespace, page, slot)

    def commit(self, namespace, page, slot):
        return self.catalog.commit(namespace, [Commit(page.key, page.parent, 0, slot, 0, 2)])[0]

    def found(self, namespace):
        keys = [page_id(f"page {index}").key for index in range(MINE_PAGES)]
        return sum(hit is not None for hit in self.catalog.lookup(namespace, keys))

    def clear(self, *arguments):
        command = ["clear", str(self.root), "--catalog", self.url, "--json", *arguments]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        return json.loads(result.stdout)

    def close(self):
        self.catalog.close()
        self.pages.close()


@pytest.fixture(params=["lmdb", "valkey"])
def filled(tmp_path, request):
    server = ServerProcess(tmp_path / "server") if request.param == "valkey" else None
    if server:
        server.start()
    filled = Filled(tmp_path, server.url.name if server else f"lmdb://{tmp_path}/catalog")
    yield filled
    filled.close()
    if server:
        server.kill()


def test_one_namespace_goes_and_the_other_stays(filled):
    before_bytes = filled.pages.used_bytes()
    report = filled.clear("--namespace", MINE.hex()[:12])
    assert (report["pages"], report["namespaces"]) == (MINE_PAGES, [MINE.hex()])
    assert report["segments"] > 1
    assert before_bytes - filled.pages.used_bytes() == report["freed_bytes"] > 0
    assert (filled.found(MINE), filled.found(OTHER)) == (0, OTHER_PAGES)


def test_a_rebuild_brings_nothing_back(filled):
    filled.clear("--all")
    assert filled.pages.segments() == []
    assert recover(filled.catalog, filled.pages, filled.facts, Metrics()).page_count == 0
    assert filled.found(MINE) == filled.found(OTHER) == 0


def test_what_was_reserved_before_is_not_published(filled):
    slot = filled.reserve(MINE)
    filled.clear("--namespace", MINE.hex())
    page = page_id("page 7", int.from_bytes(slot.generation, "big"), MINE)
    assert filled.commit(MINE, page, slot) is Verdict.EXPIRED
    assert filled.found(MINE) == 0


def test_the_store_goes_on(filled):
    filled.clear("--all")
    assert filled.store(MINE, 1) is Verdict.PUBLISHED
    assert filled.found(MINE) == 1


def test_a_file_that_the_catalog_does_not_know_goes_as_well(filled):
    """Else the next engine takes its pages over."""
    number = filled.reserve(MINE).address.segment
    filled.catalog.shrunk(number)
    filled.clear("--namespace", MINE.hex())
    assert number not in [facts.segment for facts in filled.pages.segments()]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--all", "--namespace", "6d6d6d6d"), ("--namespace", "6d"), ("--namespace", "00112233")],
)
def test_who_does_not_say_what_to_clear_clears_nothing(filled, arguments):
    command = ["clear", str(filled.root), "--catalog", filled.url, *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert "--namespace" in str(result.exception)
    assert (filled.found(MINE), filled.found(OTHER)) == (MINE_PAGES, OTHER_PAGES)


@pytest.mark.parametrize("is_named", [True, False])
def test_nothing_is_cleared_while_a_root_is_out(tmp_path, is_named):
    """What is on it would come back with it."""
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    pages = pages_open.open_roots(
        [f"posix://{root}" for root in roots], CLOCK, Asked(1 << 22, 4096, 1 << 18)
    )
    facts = pages.open()
    url = f"lmdb://{tmp_path}/catalog"
    catalog = catalog_open.open_url(url, CLOCK)
    catalog.open(facts.store_id, facts.capacity_bytes, facts.segment_bytes)
    catalog.close()
    pages.create_segment(0, MINE, GEOMETRY)
    pages.close()
    if is_named:
        (tmp_path / "b").rename(tmp_path / "elsewhere")
    named = ",".join(roots if is_named else roots[:1])
    result = CliRunner().invoke(app, ["clear", named, "--catalog", url, "--all"])
    assert "nothing is cleared" in str(result.exception)
    assert len(list(tmp_path.glob("*/segments/*.seg"))) == 1
