"""The copier over real GPU memory: every order that vLLM gives its caches, and the order of things
on the device, with an engine that is slow. Needs a GPU."""

import importlib.util

import pytest

from kvferry.device.base import SKIP, Piece
from kvferry.layout import HEADER_BYTES, PageGeometry, Region
from kvferry.testing.device import complete
from kvferry.testing.staging import Buffer

if not all(importlib.util.find_spec(name) for name in ("torch", "triton", "kvferry._native")):
    pytest.skip("needs torch, triton and the native extension", allow_module_level=True)

import torch

from kvferry import _native
from tests.device.interpreted import HAS_GPU

from kvferry.device.gpu import Cuda, Gpu, GpuCopier  # isort: skip

if not HAS_GPU:
    pytest.skip("no GPU here", allow_module_level=True)

ORDERS = [
    ("layer", "block", "head", "token"),
    ("layer", "block", "token", "head"),
    ("layer", "head", "block", "token"),
    ("block", "layer", "head", "token"),
    ("block", "layer", "token", "head"),
    ("block", "head", "layer", "token"),
]
PAGES = 5
PAGE_BLOCKS = 4
SLOW_CYCLES = 200_000_000  # about a tenth of a second


class Caches:
    """The caches of all layers as one tensor [layer, block, head, token, content] of bytes, in
    some order in memory, with a copier over them."""

    def __init__(self, order, layers=3, blocks=64, heads=8, tokens=16, content=512, gap=0):
        counts = {"layer": layers, "block": blocks, "head": heads, "token": tokens}
        shape = [counts[name] for name in order] + [content + gap]
        memory = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        axes = [order.index(name) for name in ("layer", "block", "head", "token")]
        self.memory = memory
        self._axes, self._content = axes, content
        self.view = self.view_of(memory)
        payload_bytes = layers * PAGE_BLOCKS * tokens * content
        self.geometry = PageGeometry(heads, payload_bytes, PAGE_BLOCKS * tokens)
        self.staging = Buffer(PAGES * self.geometry.page_bytes)
        buffer_bytes = 8 * self.geometry.page_bytes
        gpu = Gpu(
            Cuda(torch.device("cuda", 0)),
            self.staging.address,
            self.staging.length_bytes,
            buffer_bytes,
        )
        self.copier = GpuCopier(gpu, self._regions(), self.geometry)
        gpu.open([self.copier.warm_up])
        assert gpu.is_ready(60.0)
        self._gpu = gpu

    def view_of(self, memory):
        return memory.permute(*self._axes, 4)[..., : self._content]

    def _regions(self):
        regions = []
        for layer in self.view:
            blocks, heads, tokens, content = layer.shape
            strides = layer.stride()[:3]
            regions.append(
                Region("l", layer.data_ptr(), blocks, 1, heads, tokens, content, *strides)
            )
        return regions

    def pieces(self):
        numbers = torch.randperm(self.view.shape[1])[: PAGES * PAGE_BLOCKS].tolist()
        return [
            Piece(
                tuple(numbers[page * PAGE_BLOCKS :][:PAGE_BLOCKS]),
                self.staging.address + page * self.geometry.page_bytes,
            )
            for page in range(PAGES)
        ]

    def expected(self, pieces):
        """Payloads [page, head, bytes] of what the blocks hold now."""
        blocks = torch.tensor([piece.blocks for piece in pieces], device="cuda")
        found = self.view[:, blocks]  # layer, page, block, head, token, content
        return found.permute(1, 3, 0, 2, 4, 5).reshape(len(pieces), self.view.shape[2], -1).cpu()

    def payloads(self):
        """Payloads [page, head, bytes] of all of staging."""
        pages = torch.frombuffer(self.staging.view, dtype=torch.uint8)
        slices = pages.view(PAGES, self.geometry.slice_count, self.geometry.slice_bytes)
        return slices[:, :, HEADER_BYTES:][:, :, : self.geometry.payload_bytes].clone()

    def checksums(self):
        """Of all of staging, by page and slice, as the processor computes them."""
        geometry = self.geometry
        starts = [
            self.staging.address + index * geometry.slice_bytes + HEADER_BYTES
            for index in range(PAGES * geometry.slice_count)
        ]
        found = [_native.checksum(start, geometry.padded_payload_bytes) for start in starts]
        count = geometry.slice_count
        return tuple(tuple(found[page * count :][:count]) for page in range(PAGES))

    def close(self):
        self.copier.close()
        self._gpu.close()


@pytest.fixture
def caches_of():
    opened = []

    def make(*arguments, **named):
        opened.append(Caches(*arguments, **named))
        return opened[-1]

    yield make
    for caches in opened:
        caches.close()


SHAPES = [
    {},
    {"gap": 64},
    {"heads": 1, "content": 1152},
    {"heads": 2, "tokens": 3, "content": 7},
    {"heads": 3, "content": 20, "gap": 4},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_what_is_gathered_is_scattered_elsewhere(caches_of, order, shape):
    caches = caches_of(order, **shape)
    pieces = caches.pieces()
    (gathered,) = complete(caches.copier, [caches.copier.submit_gather(pieces)])
    content = caches.expected(pieces)
    assert torch.equal(caches.payloads(), content)
    assert gathered.checksums == caches.checksums()
    wanted = caches.memory.clone()
    targets = caches.pieces()
    for source, target in zip(pieces, targets, strict=True):
        for old, new in list(zip(source.blocks, target.blocks, strict=True))[1:]:
            caches.view_of(wanted)[:, new] = caches.view[:, old]
    scatters = [
        Piece((SKIP, *target.blocks[1:]), source.staging_address, checksums)
        for source, target, checksums in zip(pieces, targets, gathered.checksums, strict=True)
    ]
    (scattered,) = complete(caches.copier, [caches.copier.submit_scatter(scatters)])
    assert scattered.failed == ()
    assert torch.equal(caches.memory, wanted)


@pytest.mark.parametrize("offset_bytes", [0, 1, 1 << 15, -1])
@pytest.mark.parametrize("head", [0, 3, 7])
def test_a_damaged_page_is_not_scattered_and_all_others_are(caches_of, head, offset_bytes):
    caches = caches_of(("layer", "block", "token", "head"))
    pieces = caches.pieces()
    (gathered,) = complete(caches.copier, [caches.copier.submit_gather(pieces)])
    geometry = caches.geometry
    start = 2 * geometry.page_bytes + head * geometry.slice_bytes + HEADER_BYTES
    caches.staging.view[start + offset_bytes % geometry.padded_payload_bytes] ^= 1
    caches.memory.fill_(7)
    scatters = [
        Piece(piece.blocks, piece.staging_address, checksums)
        for piece, checksums in zip(pieces, gathered.checksums, strict=True)
    ]
    caches.copier.order_scatters()
    (scattered,) = complete(caches.copier, [caches.copier.submit_scatter(scatters)])
    assert scattered.failed == (2,)
    wanted = caches.payloads()
    wanted[2] = 7
    assert torch.equal(caches.expected(pieces), wanted)


def test_verifying_makes_the_host_wait_for_nothing(caches_of):
    caches = caches_of(("layer", "block", "token", "head"))
    pieces = caches.pieces()
    (gathered,) = complete(caches.copier, [caches.copier.submit_gather(pieces)])
    scatters = [
        Piece(piece.blocks, piece.staging_address, checksums)
        for piece, checksums in zip(pieces, gathered.checksums, strict=True)
    ]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLOW_CYCLES)
        caches.copier.order_scatters()
        job = caches.copier.submit_scatter(scatters)
        assert caches.copier.poll() == []
        assert caches.copier.finish([job], 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (scattered,) = complete(caches.copier, [job])
    assert scattered.failed == ()


def test_a_gather_waits_for_the_engine_and_the_engine_for_the_fence(caches_of):
    """And the host for nothing: torch raises if it is made to."""
    caches = caches_of(("layer", "block", "token", "head"))
    pieces = caches.pieces()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLOW_CYCLES)
        caches.memory.fill_(7)
        caches.copier.order_gathers()
        job = caches.copier.submit_gather(pieces)
        assert caches.copier.poll() == []
        assert caches.copier.finish([job], 0.0)
        caches.memory.fill_(9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    complete(caches.copier, [job])
    assert (caches.payloads() == 7).all()


def test_a_scatter_waits_for_the_engine(caches_of):
    caches = caches_of(("layer", "block", "token", "head"))
    pieces = caches.pieces()
    caches.staging.view[:] = b"\x05" * caches.staging.length_bytes
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW_CYCLES)
    caches.memory.fill_(7)
    caches.copier.order_scatters()
    complete(caches.copier, [caches.copier.submit_scatter(pieces)])
    assert (caches.expected(pieces) == 5).all()


def test_later_work_of_the_engine_delays_nothing(caches_of):
    """What was submitted before the engine went on need not wait for it."""
    caches = caches_of(("layer", "block", "token", "head"))
    caches.copier.order_gathers()
    torch.cuda._sleep(20 * SLOW_CYCLES)
    engine = torch.cuda.current_stream().record_event()
    complete(caches.copier, [caches.copier.submit_gather(caches.pieces())])
    assert not engine.query()
    torch.cuda.synchronize()
