"""The checksum of the GPU is that of the format: what one has written the others read."""

import importlib.util
from array import array

import pytest

if not all(importlib.util.find_spec(name) for name in ("torch", "triton", "kvferry._native")):
    pytest.skip("needs torch, triton and the native extension", allow_module_level=True)

import torch

from kvferry import _native
from kvferry.device.base import SKIP
from kvferry.layout import HEADER_BYTES, PageGeometry
from tests.device.interpreted import HAS_GPU

from kvferry.device.kernels import LANES_AT_ONCE, SliceProver  # isort: skip

DEVICE = "cuda" if HAS_GPU else "cpu"
HEADS = 3
PIECES = 2
SLICES = PIECES * HEADS
BLOCKS = 5


class Extents:
    """Random pages one after the other in memory of the device, and the slip of a batch."""

    def __init__(self, payload_bytes: int):
        geometry = PageGeometry(HEADS, payload_bytes, 16)
        shape = (SLICES, geometry.slice_bytes)
        generator = torch.Generator().manual_seed(payload_bytes)
        pages = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        payloads = [page[HEADER_BYTES:].clone() for page in pages]
        self.checksums = [_native.checksum(found.data_ptr(), found.numel()) for found in payloads]
        self._pages = pages.to(DEVICE)
        self._prover = SliceProver(HEADS, geometry)

    def prove(self, expected: list[int], *, is_gate: bool) -> tuple[list[int], list[list[int]]]:
        """Checksums that were found, and the blocks of each piece after that."""
        words = array("Q", [0] * SLICES + expected).tobytes()
        slip = array("q", words + array("q", range(PIECES * BLOCKS)).tobytes())
        tensor = torch.frombuffer(slip, dtype=torch.int64).to(DEVICE)
        self._prover.prove(tensor, SLICES, self._pages.data_ptr(), BLOCKS, is_gate)
        found = tensor[:SLICES].view(torch.uint64).tolist()
        return found, tensor[2 * SLICES :].view(PIECES, BLOCKS).tolist()


@pytest.mark.parametrize("lanes", [1, 3, LANES_AT_ONCE, 2 * LANES_AT_ONCE + 1])
def test_checksums_are_those_of_the_processor(lanes):
    extents = Extents(lanes * 4096 - 100)
    found, blocks = extents.prove([0] * SLICES, is_gate=False)
    assert found == extents.checksums
    assert blocks == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("damaged", range(SLICES))
def test_a_gate_shuts_for_the_piece_with_a_slice_that_differs(damaged):
    extents = Extents(4096)
    expected = list(extents.checksums)
    expected[damaged] ^= 1 << 63
    found, blocks = extents.prove(expected, is_gate=True)
    assert found == extents.checksums
    wanted = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    wanted[damaged // HEADS] = [SKIP] * BLOCKS
    assert blocks == wanted


def test_a_gate_is_open_for_what_is_whole():
    extents = Extents(4096)
    _, blocks = extents.prove(extents.checksums, is_gate=True)
    assert blocks == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
