"""The posix page store conforms, with and without the page cache, and what only it can do wrong."""

import pytest

from kvferry.testing.clock import ManualClock
from kvferry.testing.pages import PageStoreSuite

pytest.importorskip("kvferry._native")
from kvferry.testing.posix_place import PosixPlace


class TestDirect(PageStoreSuite):
    @pytest.fixture
    def place(self, tmp_path):
        return PosixPlace(tmp_path / "store", ManualClock())


class TestBuffered(PageStoreSuite):
    @pytest.fixture
    def place(self, tmp_path):
        return PosixPlace(tmp_path / "store", ManualClock(), direct_io="off")
