"""The link over NIXL passes the suite, over TCP or shared memory on one machine."""

import importlib.util

import pytest

from kvferry._nixl import PACKAGES
from kvferry.clock import SystemClock
from kvferry.testing.link import LinkSuite
from kvferry.transfer.nixl_link import NixlLink

IS_THERE = any(importlib.util.find_spec(package) for package in PACKAGES)


@pytest.mark.skipif(not IS_THERE, reason="NIXL is not installed")
class TestNixlLink(LinkSuite):
    def make_link(self):
        return NixlLink(SystemClock())
