"""Copiers of host memory against their contract: a wrong byte here is another request's KV."""

import importlib.util

import pytest

from kvferry.pages import memory
from kvferry.testing.clock import Chance
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.device import CopierSuite, ProofSuite


class TestReference(CopierSuite):
    def make(self, rig):
        return ReferenceCopier(rig.regions, rig.geometry)


class TestUnhurriedReference(CopierSuite, ProofSuite):
    digest = staticmethod(memory.digest)

    def make(self, rig):
        return ReferenceCopier(rig.regions, rig.geometry, Chance(1), self.digest)


@pytest.mark.skipif(
    importlib.util.find_spec("kvferry._native") is None, reason="no native extension"
)
class TestHost(CopierSuite):
    def make(self, rig):
        from kvferry.device.host import HostCopier  # noqa: PLC0415  needs the native extension

        return HostCopier(rig.regions, rig.geometry, thread_count=2)
