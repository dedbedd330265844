"""One store on disk, as a test sees it: how engines are told to use it, and what lies in it."""

import time
from pathlib import Path
from typing import Any

from kvferry.cli.opened import open_store
from kvferry.config import decode
from tests.e2e.engine import connector

CHUNK_TOKENS = 64
CAPACITY_BYTES = 256 << 20
PATIENCE_S = 60.0


class Store:
    """Below `folder`. Stores end in the background, so whoever wants to see them waits."""

    def __init__(self, folder: Path):
        self.pages = folder / "pages"
        self.catalog_url = f"lmdb://{folder / 'catalog'}"

    def settings(self, **extra: Any) -> dict[str, Any]:
        """`LLM` arguments of an engine that uses this store."""
        options = {
            "pages": f"posix://{self.pages}",
            "catalog": self.catalog_url,
            "capacity_bytes": CAPACITY_BYTES,
            "chunk_tokens": CHUNK_TOKENS,
        }
        return {"kv_transfer_config": connector(**(options | extra))}

    def page_count(self) -> int:
        """Pages that can be found now; 0 before there is a store."""
        options = {"pages": f"posix://{self.pages}", "catalog": self.catalog_url}
        if not self.pages.exists():
            return 0
        with open_store(decode(options)) as opened:
            assert opened.catalog is not None
            return sum(space.page_count for space in opened.catalog.stats().spaces)

    def wait_for_pages(self, count: int) -> None:
        """Returns when there are `count` pages. Fails if there are more, or never as many."""
        give_up_s = time.monotonic() + PATIENCE_S
        while (found := self.page_count()) != count:
            assert found < count, f"{found} pages, expected {count}"
            assert time.monotonic() < give_up_s, f"{found} pages, {count} never came"
            time.sleep(0.05)
