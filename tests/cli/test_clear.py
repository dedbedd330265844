"""Who clears a store must be sure that nothing comes back, and that others keep what is theirs."""

import pytest

pytest.importorskip("kvferry._native", reason="posix pages need the native extension")
from typer.testing import CliRunner

from kvferry.catalog import open as catalog_open
from kvferry.catalog.base import Verdict
from kvferry.cli.main import app
from kvferry.metrics import Metrics
from kvferry.offload.space.recovery import recover
from kvferry.pages import open as pages_open
from kvferry.pages.facts import Asked
from kvferry.testing.staging import page_id
from kvferry.testing.valkey import ServerProcess
from tests.cli.stored import (
    CAPACITY_BYTES,
    CLOCK,
    GEOMETRY,
    MINE,
    MINE_PAGES,
    OTHER,
    OTHER_PAGES,
    SEGMENT_BYTES,
    Filled,
)


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


def test_one_tenant_goes_and_the_others_stay(filled):
    for index in range(2):
        filled.store(MINE, MINE_PAGES + index, "team")
        filled.store(OTHER, MINE_PAGES + index, "team")
    report = filled.clear("--tenant", "team")
    assert (report["pages"], report["segments"]) == (4, 2)
    assert report["namespaces"] == [MINE.hex(), OTHER.hex()]
    assert (filled.found(MINE), filled.found(OTHER)) == (MINE_PAGES, OTHER_PAGES)
    assert filled.clear("--tenant", "")["pages"] == MINE_PAGES + OTHER_PAGES, "who have no name"


def test_a_file_of_a_tenant_that_the_catalog_does_not_know_goes_as_well(filled):
    filled.store(MINE, 1, "team")
    number = filled.reserve(MINE, "team").address.segment
    filled.catalog.shrunk(number)
    assert filled.clear("--tenant", "team")["segments"] == 1
    assert number not in [facts.segment for facts in filled.pages.segments()]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--all", "--namespace", "6d6d6d6d"),
        ("--all", "--tenant", "a"),
        ("--namespace", "6d"),
        ("--namespace", "00112233"),
    ],
)
def test_who_does_not_say_what_to_clear_clears_nothing(filled, arguments):
    command = ["clear", str(filled.root), "--catalog", filled.url, *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert "--namespace" in str(result.exception)
    assert (filled.found(MINE), filled.found(OTHER)) == (MINE_PAGES, OTHER_PAGES)


@pytest.mark.parametrize(
    ("is_named", "words"), [(True, "nothing is cleared"), (False, "the store has more roots")]
)
def test_nothing_is_cleared_while_a_root_is_out(tmp_path, is_named, words):
    """What is on it would come back with it."""
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    pages = pages_open.open_roots(
        [f"posix://{root}" for root in roots], CLOCK, Asked(CAPACITY_BYTES, 4096, SEGMENT_BYTES)
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
    assert words in str(result.exception)
    assert len(list(tmp_path.glob("*/segments/*.seg"))) == 1
