"""The page checksum (docs/formats.md) as a Triton kernel: agrees bit for bit, and how fast.

    python benchmarks/checksum_triton.py

On a GPU it compares and then measures; without one Triton's interpreter compares. Each program
takes some lanes of one slice and adds their sum to the slice's total: adding is free of order, so
the result does not depend on how the work was cut. Needs torch and triton, and compares with
kvferry's native form where that is installed.
"""

import importlib.util
import json
import os
import statistics
import struct
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
GOLDEN = Path(__file__).parent.parent / "tests/golden/checksum.json"
LANE_BYTES = 4096
LANE_WORDS = 512
MASK = (1 << 64) - 1
P1 = tl.constexpr(0x9E3779B185EBCA87)
P2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
G = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def mix(x):
    x = x ^ (x >> 32)
    x = x * P2
    return x ^ (x >> 29)


@triton.jit
def add_lanes(words, totals, slice_words, lane_count, LANES: tl.constexpr):
    """`totals[slice]` += the sum over lanes of one slice, LANES of them in each program.

    Unsigned 64-bit arithmetic on int64 tensors; the first grid axis is the slice.
    """
    slice_index = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    columns = tl.arange(0, 64)
    start = words + slice_index * slice_words
    offsets = lanes[:, None] * 512 + columns[None, :]
    is_there = (lanes < lane_count)[:, None] & (columns >= 0)[None, :]
    state = tl.zeros([LANES, 64], tl.uint64) + ((columns + 1).to(tl.uint64) * G)[None, :]
    for row in tl.static_range(8):
        word = tl.load(start + offsets + row * 64, mask=is_there, other=0)
        state = (state ^ word.to(tl.uint64, bitcast=True)) * P1
        state = (state << 31) | (state >> 33)
    lane_sums = tl.sum(mix(state), axis=1)
    mixed = mix(lane_sums + (lanes + 1).to(tl.uint64) * G)
    mixed = tl.where(lanes < lane_count, mixed, 0)
    total = tl.sum(mixed, axis=0)
    tl.atomic_add(totals + slice_index, total.to(tl.int64, bitcast=True), sem="relaxed")


def launch(slices: torch.Tensor, totals: torch.Tensor, lanes: int, warps: int) -> None:
    """`slices`: int64 [slice, words], contiguous. `totals`: int64 [slice], zeros before."""
    slice_count, slice_words = slices.shape
    lane_count = slice_words // LANE_WORDS
    grid = (slice_count, triton.cdiv(lane_count, lanes))
    add_lanes[grid](slices, totals, slice_words, lane_count, LANES=lanes, num_warps=warps)


def finish(total: int, length_bytes: int) -> int:
    """The last step for one slice, on the host."""
    x = (total & MASK) ^ length_bytes
    x ^= x >> 32
    x = x * P2.value & MASK
    return x ^ x >> 29


def checksums(slices: torch.Tensor, lanes: int = 4, warps: int = 4) -> list[int]:
    """One checksum for each row of a contiguous uint8 or int64 tensor on the device."""
    slices = slices.view(torch.int64)
    totals = torch.zeros(slices.shape[0], dtype=torch.int64, device=slices.device)
    launch(slices, totals, lanes, warps)
    return [finish(total, slices.shape[1] * 8) for total in totals.tolist()]


def golden_content(fill: str, length_bytes: int) -> bytes:
    """As in tests/native/test_checksum.py."""
    if fill == "words":
        words = [(i + 1) * G.value & MASK for i in range(length_bytes // 8)]
        return struct.pack(f"<{len(words)}Q", *words)
    return {"zeros": b"\x00", "ones": b"\xff"}[fill] * length_bytes


def compare_golden(lanes: int) -> None:
    vectors = [vector for vector in json.loads(GOLDEN.read_text()) if vector["length_bytes"]]
    for vector in vectors:
        content = golden_content(vector["fill"], vector["length_bytes"])
        row = torch.tensor(list(content), dtype=torch.uint8, device=DEVICE).view(1, -1)
        (found,) = checksums(row, lanes)
        assert f"{found:016x}" == vector["checksum"], (vector, f"{found:016x}")


def compare_native(lanes: int) -> None:
    from kvferry import _native  # noqa: PLC0415

    generator = torch.Generator().manual_seed(lanes)
    for lane_count in (1, 3, 4, 17):
        shape = (3, lane_count * LANE_BYTES)
        slices = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        expected = [_native.checksum(row.data_ptr(), row.numel()) for row in slices]
        assert checksums(slices.to(DEVICE), lanes) == expected


def measure(slice_count: int, slice_bytes: int, lanes: int, warps: int) -> float:
    """Median GB/s over 20 launches, each over the whole tensor (larger than the GPU's cache)."""
    slices = torch.randint(-(2**62), 2**62, (slice_count, slice_bytes // 8), device=DEVICE)
    totals = torch.zeros(slice_count, dtype=torch.int64, device=DEVICE)
    times_ms = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(slices, totals, lanes, warps)
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return slice_count * slice_bytes / statistics.median(times_ms[3:]) / 1e6


def main() -> None:
    has_native = importlib.util.find_spec("kvferry") and importlib.util.find_spec("kvferry._native")
    for lanes in (1, 4, 16):
        compare_golden(lanes)
        if has_native:
            compare_native(lanes)
    print(f"{DEVICE}: equal to the golden vectors{' and the native form' if has_native else ''}")
    if not HAS_GPU:
        return
    print(torch.cuda.get_device_name())
    for lanes in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8):
            rate = measure(512, 1 << 20, lanes, warps)
            print(f"lanes {lanes:2}  warps {warps}  {rate:7.0f} GB/s over 512 slices of 1 MiB")


if __name__ == "__main__":
    main()
