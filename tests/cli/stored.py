"""A store with pages on a disk and a catalog, open beside the commands that change it."""

import json
from dataclasses import replace

from typer.testing import CliRunner

from kvferry.catalog import open as catalog_open
from kvferry.catalog.base import Commit, Space, Verdict
from kvferry.cli.main import app
from kvferry.clock import SystemClock
from kvferry.keys import tenant_id
from kvferry.layout import PageGeometry
from kvferry.pages import open as pages_open
from kvferry.pages.base import slot_count
from kvferry.pages.facts import Asked
from kvferry.testing.staging import Driver, page_id

GEOMETRY = PageGeometry(slice_count=2, payload_bytes=5000, chunk_tokens=16)
CLOCK = SystemClock()
MINE, OTHER = b"m" * 32, b"o" * 32
MINE_PAGES, OTHER_PAGES = 30, 3
SEGMENT_BYTES = 1 << 18
CAPACITY_BYTES = 1 << 22


class Filled:
    """A store with two namespaces, open beside whoever clears it, as an engine has it."""

    def __init__(self, folder, url):
        self.root, self.url = folder / "kv", url
        self.pages = pages_open.open_url(
            f"posix://{self.root}", CLOCK, Asked(CAPACITY_BYTES, 4096, SEGMENT_BYTES)
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

    def reserve(self, namespace, tenant=""):
        owner = tenant_id(tenant)
        while not (slots := self.catalog.reserve(namespace, 1, 60.0, owner)):
            segment = self.catalog.grow(namespace, owner)
            self.pages.create_segment(segment, namespace, GEOMETRY)
            self.catalog.grown(segment)
        return slots[0]

    def store(self, namespace, index, tenant=""):
        slot = self.reserve(namespace, tenant)
        page = page_id(f"page {index}", int.from_bytes(slot.generation, "big"), namespace)
        page = replace(page, tenant=tenant_id(tenant))
        assert self._driver.write(page, slot.address).outcome.value == "ok"
        return self.commit(namespace, page, slot)

    def commit(self, namespace, page, slot):
        return self.catalog.commit(namespace, [Commit(page.key, page.parent, 0, slot, 0, 2)])[0]

    def found(self, namespace):
        keys = [page_id(f"page {index}").key for index in range(MINE_PAGES)]
        return sum(hit is not None for hit in self.catalog.lookup(namespace, keys))

    def clear(self, *arguments):
        return self.say("clear", *arguments)

    def say(self, verb, *arguments):
        """What a command answers."""
        command = [verb, str(self.root), "--catalog", self.url, "--json", *arguments]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        return json.loads(result.stdout)

    def close(self):
        self.catalog.close()
        self.pages.close()
