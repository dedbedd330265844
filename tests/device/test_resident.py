"""The copier whose staging is GPU memory, against its contract: interpreted where there is no GPU,
else on the GPU, with memory that host and GPU share."""

import importlib.util
from array import array

import pytest

from kvferry.device.base import Piece
from kvferry.testing.device import NESTINGS, CopierSuite, Rig

if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
    pytest.skip("needs torch and triton", allow_module_level=True)

import torch

from tests.device.interpreted import HAS_GPU, LateDevice

from kvferry.device.gpu import Cuda  # isort: skip
from kvferry.device.resident import ResidentCopier  # isort: skip


@pytest.mark.skipif(HAS_GPU, reason="there is a real GPU, and kernels are not interpreted")
class TestInterpreted(CopierSuite):
    """The engine's work is done at once."""

    seed = 0

    @pytest.fixture(autouse=True)
    def device(self):
        self.device = LateDevice(self.seed)

    def make(self, rig):
        return ResidentCopier(self.device, rig.regions, rig.geometry)

    def engine_does(self, work):
        self.device.engine.put(work)


class TestBehindASlowEngine(TestInterpreted):
    """The engine's work is done last."""

    seed = 1
    test_layouts_and_degrees_read_one_another = None  # nothing to do with the engine, and slow


class SharedMemory(Cuda):
    """A GPU that reaches the rig's memory, which stands in for its own."""

    def __init__(self, rig: Rig):
        super().__init__(torch.device("cuda", 0))
        self.pinned = [(m.address, m.length_bytes) for m in [*rig.memory, rig.staging]]
        for address, length_bytes in self.pinned:
            self.pin(address, length_bytes)


class OnlyCopier(ResidentCopier):
    """Closes the GPU's part as well."""

    def close(self):
        super().close()
        while self._cuda.pinned:
            self._cuda.unpin(self._cuda.pinned.pop()[0])


@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
class TestGpu(CopierSuite):
    def make(self, rig):
        return OnlyCopier(SharedMemory(rig), rig.regions, rig.geometry)

    def engine_does(self, work):
        torch.cuda.current_stream().synchronize()
        work()


@pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted")
def test_a_job_that_fails_half_way_writes_nothing_after_it_has_failed():
    """Its blocks go to other requests then."""
    rig = Rig(NESTINGS["opaque blocks"], range(1), extent_count=4)
    device = LateDevice()
    copier = ResidentCopier(device, rig.regions, rig.geometry)
    copier.open()
    for index in range(4):
        rig.write_extent(index, ["old"])
    slips = iter([device.slip(array("q", [1]))])
    device.slip = lambda words: next(slips)
    with pytest.raises(StopIteration):
        copier.submit_scatter([Piece((index + 1,), rig.addresses[index]) for index in range(4)])
    rig.write_blocks([1, 2], ["new", "new"])
    while device.step():
        pass
    rig.write_blocks([3], ["new"])
    assert rig.read_block(1) == rig.read_block(2) == rig.read_block(3)
    copier.close()
