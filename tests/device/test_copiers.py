"""Both copiers against their contract: a wrong byte here is another request's KV cache."""

import importlib.util

import pytest

from kvferry.testing.clock import Chance
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.device import CopierSuite


class TestReference(CopierSuite):
    def make(self, regions, geometry):
        return ReferenceCopier(regions, geometry)


class TestUnhurriedReference(CopierSuite):
    def make(self, regions, geometry):
        return ReferenceCopier(regions, geometry, Chance(1))


@pytest.mark.skipif(
    importlib.util.find_spec("kvferry._native") is None, reason="no native extension"
)
class TestHost(CopierSuite):
    def make(self, regions, geometry):
        from kvferry.device.host import HostCopier  # noqa: PLC0415  needs the native extension

        return HostCopier(regions, geometry, thread_count=2)
