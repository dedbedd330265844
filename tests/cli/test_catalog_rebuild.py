"""After a catalog was lost an operator gets the hits back, and gives no slot to two catalogs."""

import json

import pytest

pytest.importorskip("kvferry._native", reason="posix pages need the native extension")
from typer.testing import CliRunner

from kvferry.cli import catalog_rebuild
from kvferry.cli.main import app
from kvferry.clock import SystemClock
from kvferry.errors import IncompatibleError
from kvferry.layout import Address, PageGeometry
from kvferry.pages import open as pages_open
from kvferry.pages.facts import Asked
from kvferry.pages.owner import StoreOwnership
from kvferry.testing.clock import ManualClock
from kvferry.testing.staging import Driver, page_id
from kvferry.testing.valkey import ServerProcess

GEOMETRY = PageGeometry(slice_count=2, payload_bytes=5000, chunk_tokens=16)
NAMESPACE = b"n" * 32
CLOCK = SystemClock()


@pytest.fixture
def server(tmp_path):
    server = ServerProcess(tmp_path / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def root(tmp_path):
    """A store with two segments and three whole pages; of a fourth one slice is another's."""
    root = tmp_path / "kv"
    pages = pages_open.open_url(f"posix://{root}", CLOCK, Asked(1 << 22, 4096, 1 << 18))
    pages.open()
    driver = Driver(pages, GEOMETRY)
    for segment in (0, 3):
        pages.create_segment(segment, NAMESPACE, GEOMETRY)
    for number, address in enumerate([Address(0, 0), Address(0, 2), Address(3, 1), Address(3, 2)]):
        page = page_id(f"page {number}", generation=number + 1, namespace=NAMESPACE)
        assert driver.write(page, address).outcome.value == "ok"
    torn = page_id("another", generation=9, namespace=NAMESPACE)
    assert driver.write(torn, Address(3, 2), slices=range(1, 2)).outcome.value == "ok"
    pages.close()
    return root


def said(*arguments) -> dict:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    return json.loads(result.stdout)


def test_an_empty_catalog_is_filled_from_the_pages(root, server):
    url = server.url.name
    first = said("catalog", "rebuild", root, "--catalog", url, "--json")
    assert first == {
        "catalog": url,
        "known_segments": 0,
        "adopted_segments": 2,
        "deleted_segments": 0,
        "forgotten_segments": 0,
        "adopted_pages": 3,
    }
    again = said("catalog", "rebuild", root, "--catalog", url, "--json")
    assert (again["known_segments"], again["adopted_pages"]) == (2, 0)
    shown = said("status", root, "--catalog", url, "--json")
    assert shown["catalog"]["pages"] == 3
    checked = said("check", root, "--catalog", url, "--json")
    assert (checked["checked_count"], checked["bad"], checked["contradictions"]) == (3, [], [])


def test_a_store_in_use_with_another_catalog_is_left_to_it(root, server):
    owner = StoreOwnership(root, "ab" * 16, ManualClock())
    owner.acquire(1.0)

    class Watching(ManualClock):
        """Time passes, and the owner beats."""

        def sleep(self, duration_s):
            super().sleep(duration_s)
            owner.beat()

    with pytest.raises(IncompatibleError, match="another catalog"):
        catalog_rebuild.refuse_rival(root, b"\xcd" * 16, Watching())
    catalog_rebuild.refuse_rival(root, b"\xab" * 16, Watching())
