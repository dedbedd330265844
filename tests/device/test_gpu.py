"""The copier of GPU memory against its contract. Where there is no GPU, on a device whose queues
are late by chance and whose kernels are interpreted; where there is one, on the GPU, with engine
memory and staging that host and GPU share."""

import importlib.util
from array import array

import pytest

from kvferry.checksum import checksum_reference
from kvferry.testing.device import NESTINGS, TIMEOUT_S, CopierSuite, ProofSuite, Rig, complete

if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
    pytest.skip("needs torch and triton", allow_module_level=True)

import torch

from kvferry.device.base import Piece
from kvferry.errors import ConfigError, UnavailableError
from tests.device.interpreted import HAS_GPU, LateDevice

from kvferry.device.gpu import CHUNKS_PER_LANE, Cuda, Gpu, GpuCopier  # isort: skip

PIECES_PER_CHUNK = 2


class OnlyCopier(GpuCopier):
    """Closes the GPU's part as well."""

    def close(self):
        super().close()
        self._gpu.close()


def copier_over(rig: Rig, device, *, proves_pages: bool = False) -> GpuCopier:
    """A copier whose chunks hold two extents, opened and ready."""
    extent_bytes = len(rig.heads) * rig.geometry.slice_bytes
    buffer_bytes = 2 * CHUNKS_PER_LANE * PIECES_PER_CHUNK * extent_bytes
    gpu = Gpu(device, rig.staging.address, rig.staging.length_bytes, buffer_bytes)
    copier = OnlyCopier(gpu, rig.regions, rig.geometry, proves_pages=proves_pages)
    gpu.open([copier.warm_up])
    return copier


@pytest.mark.skipif(HAS_GPU, reason="there is a real GPU, and kernels are not interpreted")
class TestInterpreted(CopierSuite):
    """The engine's work is done at once."""

    seed = 0

    @pytest.fixture(autouse=True)
    def device(self):
        self.device = LateDevice(self.seed)

    def make(self, rig):
        return copier_over(rig, self.device)

    def engine_does(self, work):
        self.device.engine.put(work)


class TestBehindASlowEngine(TestInterpreted):
    """The engine's work is done last."""

    seed = 1
    test_layouts_and_degrees_read_one_another = None  # nothing to do with the engine, and slow


@pytest.mark.skipif(HAS_GPU, reason="there is a real GPU, and kernels are not interpreted")
class TestInterpretedProof(ProofSuite):
    digest = staticmethod(checksum_reference)

    def make(self, rig):
        return copier_over(rig, LateDevice(), proves_pages=True)


class SharedMemory(Cuda):
    """A GPU that reaches the rig's memory, which stands in for its own."""

    def __init__(self, rig: Rig):
        super().__init__(torch.device("cuda", 0))
        self._memory = rig.memory

    def pin(self, address: int, length_bytes: int) -> None:
        super().pin(address, length_bytes)
        for memory in self._memory:
            super().pin(memory.address, memory.length_bytes)

    def unpin(self, address: int) -> None:
        for start in [address, *(memory.address for memory in self._memory)]:
            super().unpin(start)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
class TestGpu(CopierSuite, ProofSuite):
    digest = staticmethod(checksum_reference)

    def make(self, rig):
        return copier_over(rig, SharedMemory(rig), proves_pages=True)

    def engine_does(self, work):
        torch.cuda.current_stream().synchronize()
        work()


def test_a_page_that_does_not_fit_is_refused_with_the_size_to_set():
    rig = Rig(NESTINGS["opaque blocks"], range(2))
    gpu = Gpu(LateDevice(), rig.staging.address, rig.staging.length_bytes, 1 << 14)
    with pytest.raises(ConfigError, match=str(2 * CHUNKS_PER_LANE * 2 * rig.geometry.slice_bytes)):
        GpuCopier(gpu, rig.regions, rig.geometry)


class FailedDevice(LateDevice):
    """Cannot pin."""

    def pin(self, address, length_bytes):
        raise UnavailableError("device.pinning", "no")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted")
def test_a_device_that_cannot_pin_fails_its_jobs_and_hangs_nobody():
    rig = Rig(NESTINGS["opaque blocks"], range(1))
    copier = copier_over(rig, FailedDevice())
    for call in (copier.poll, lambda: copier.finish([1], TIMEOUT_S)):
        with pytest.raises(UnavailableError):
            copier.submit_gather([Piece((1, 2, 3), rig.addresses[0])])
            call()
    copier.close()


@pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted")
def test_no_job_starts_before_staging_is_pinned():
    """A copy of memory that is not pinned would stop the engine's thread."""
    rig = Rig(NESTINGS["opaque blocks"], range(1))
    device = LateDevice()
    gpu = Gpu(device, rig.staging.address, rig.staging.length_bytes, 1 << 20)
    copier = GpuCopier(gpu, rig.regions, rig.geometry)
    gpu.open()
    gpu._thread.join()
    gpu._ready.clear()
    rig.write_blocks([1, 2, 3], ["a", "b", "c"])
    job = copier.submit_gather([Piece((1, 2, 3), rig.addresses[0])])
    assert copier.poll() == []
    assert not copier.finish([job], 0.0)
    gpu._ready.set()
    assert copier.finish([job], 0.0)
    complete(copier, [job])
    assert rig.payloads(0) == rig.padded_payloads(["a", "b", "c"])


@pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted")
def test_a_job_that_fails_half_way_writes_nothing_after_it_has_failed():
    """Its blocks go to other requests then."""
    rig = Rig(NESTINGS["opaque blocks"], range(1), extent_count=4)
    device = LateDevice()
    copier = copier_over(rig, device)
    assert copier._gpu.is_ready(TIMEOUT_S)
    for index in range(4):
        rig.write_extent(index, ["old"])
    slips = iter([device.slip(array("q", [1, 2]))])
    device.slip = lambda words: next(slips)
    pieces = [Piece((index + 1,), rig.addresses[index]) for index in range(4)]
    with pytest.raises(RuntimeError):
        copier.submit_scatter(pieces)
    rig.write_blocks([1, 2], ["new", "new"])
    while device.step():
        pass
    assert rig.read_block(1) == rig.read_block(2) == expected_block(rig, "new")
    copier.close()


class LateKernels(LateDevice):
    """Copies whenever it can, and runs kernels only when there is nothing to copy."""

    def step(self):
        return any(queue.step() for queue in reversed(self._queues))


@pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted")
def test_a_gather_is_done_when_its_checksums_are():
    """Else the page is written with checksums of nothing, and whoever reads it evicts it."""
    rig = Rig(NESTINGS["opaque blocks"], range(1))
    copier = copier_over(rig, LateKernels(), proves_pages=True)
    rig.write_blocks([1, 2, 3], ["a", "b", "c"])
    (done,) = complete(copier, [copier.submit_gather([Piece((1, 2, 3), rig.addresses[0])])])
    (payload,) = rig.payloads(0)
    assert done.checksums == ((checksum_reference(payload),),)
    copier.close()


def expected_block(rig: Rig, name: str) -> list[bytes]:
    rig.write_blocks([3], [name])
    return rig.read_block(3)
