"""Pages on 3FS through the emulated library: the contract, its faults, and what it leaves behind."""

import pytest

pytest.importorskip("kvferry._native")
from kvferry.testing.pages import PageStoreSuite

from .usrbio_place import UsrbioPlace


class TestUsrbio(PageStoreSuite):
    @pytest.fixture
    def place(self, emulation):
        return UsrbioPlace(emulation)
