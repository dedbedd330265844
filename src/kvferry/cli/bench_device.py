"""Measures the copier of GPU memory against what the machine can do, measured beside it.

    link      gather to and scatter from pinned staging, against one large copy of as many bytes
    kernel    the kernels alone, in GPU memory, against a copy there (bytes read and written; of
              the checksums, which only read, the bytes read)
    submit    what the calling thread spends on handing over one page

`_verify`: with checksums, of what was gathered and before anything is scattered.

Blocks have 16 tokens and are taken in a shuffled order, as a busy engine hands them out. Rates are
medians of rounds in which the contenders take turns; only payload counts.
"""

import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvferry.cli.bench_io import Memory
from kvferry.clock import Clock
from kvferry.device.base import Done, Piece
from kvferry.device.gpu import Cuda, Gpu, GpuCopier
from kvferry.layout import PageGeometry, Region, default_chunk_tokens

BLOCK_TOKENS = 16
STAGING_BYTES = 1 << 30
BUFFER_BYTES = 256 << 20
KERNEL_BYTES = 1 << 30
TIMEOUT_S = 60.0
SHUFFLE = 1_000_003
"""A prime: multiples of it, modulo the number of blocks, are all blocks in a wild order."""


@dataclass(frozen=True, slots=True)
class Model:
    """The KV cache of a model on one rank. `content_bytes`: K and V of one token and head."""

    name: str
    layer_count: int
    head_count: int
    content_bytes: int

    @property
    def chunk_tokens(self) -> int:
        return default_chunk_tokens(self.layer_count * self.content_bytes, BLOCK_TOKENS)

    @property
    def geometry(self) -> PageGeometry:
        payload_bytes = self.layer_count * self.chunk_tokens * self.content_bytes
        return PageGeometry(self.head_count, payload_bytes, self.chunk_tokens)

    @property
    def block_bytes(self) -> int:
        """Of one layer."""
        return self.head_count * BLOCK_TOKENS * self.content_bytes


MODELS = (Model("8b", 36, 8, 512), Model("0.6b", 28, 8, 512))
LAYOUTS = ("tokens outside heads", "heads outside tokens")


class Rig:
    """Engine memory of one model in one layout, staging, and two copiers: a plain one, and one
    that proves pages. `close` at the end."""

    def __init__(self, clock: Clock, cuda: Cuda, model: Model, layout: str, buffer_bytes: int):
        self._clock = clock
        self.cuda = cuda
        self.model = model
        self.staging = Memory(STAGING_BYTES)
        self.gpu = Gpu(cuda, self.staging.address, STAGING_BYTES, buffer_bytes)
        self.extent_bytes = model.geometry.page_bytes
        self.page_count = STAGING_BYTES // self.extent_bytes
        self.page_blocks = model.chunk_tokens // BLOCK_TOKENS
        self.payload_bytes = self.page_blocks * model.layer_count * model.block_bytes
        block_count = 2 * self.page_count * self.page_blocks
        self._copied = cuda.buffer(STAGING_BYTES)
        self.caches = [
            cuda.buffer(block_count * model.block_bytes) for _ in range(model.layer_count)
        ]
        self.copier, self.proving = (
            GpuCopier(
                self.gpu, self._regions(layout, block_count), model.geometry, proves_pages=proves
            )
            for proves in (False, True)
        )
        self.gpu.open([self.copier.warm_up, self.proving.warm_up])
        self.gpu.is_ready(TIMEOUT_S)
        self._blocks = [index * SHUFFLE % block_count for index in range(block_count)]

    def _regions(self, layout: str, block_count: int) -> list[Region]:
        model, content_bytes = self.model, self.model.content_bytes
        head_stride, token_stride = content_bytes, model.head_count * content_bytes
        if layout == "heads outside tokens":
            head_stride, token_stride = BLOCK_TOKENS * content_bytes, content_bytes
        return [
            Region(
                f"layer.{index}",
                cache.data_ptr(),
                block_count,
                1,
                model.head_count,
                BLOCK_TOKENS,
                content_bytes,
                model.block_bytes,
                head_stride,
                token_stride,
            )
            for index, cache in enumerate(self.caches)
        ]

    def pages(self, page_count: int) -> list[Piece]:
        return [
            Piece(
                tuple(self._blocks[page * self.page_blocks :][: self.page_blocks]),
                self.staging.address + page * self.extent_bytes,
            )
            for page in range(page_count)
        ]

    def jobs(self, page_count: int) -> dict[str, Callable[[], float]]:
        """Each runs one job of so many pages, from its submission to its end, and returns when its
        submission was over. A gather comes before a scatter that verifies what it has left."""
        pieces = self.pages(page_count)
        done = self._await_end(self.proving, self.proving.submit_gather(pieces))
        proven = [
            replace(piece, checksums=checksums)
            for piece, checksums in zip(pieces, done.checksums, strict=True)
        ]
        return {
            "gather": partial(self._run, self.copier, "submit_gather", pieces),
            "gather_verify": partial(self._run, self.proving, "submit_gather", pieces),
            "scatter": partial(self._run, self.copier, "submit_scatter", pieces),
            "scatter_verify": partial(self._run, self.proving, "submit_scatter", proven),
        }

    def _run(self, copier: GpuCopier, verb: str, pieces: Sequence[Piece]) -> float:
        job = getattr(copier, verb)(pieces)
        submitted_s = self._clock.now_s()
        assert not self._await_end(copier, job).failed
        return submitted_s

    def _await_end(self, copier: GpuCopier, job: int) -> Done:
        while True:
            for done in copier.poll():
                if done.job == job:
                    return done

    def copy(self, is_out: bool) -> None:
        """As many bytes as all pages have, at once."""
        length_bytes = self.page_count * self.payload_bytes
        staging = self.gpu.staging[:length_bytes]
        buffer = self._copied[:length_bytes]
        queue = self.gpu.lane(is_out).copies
        target, source = (staging, buffer) if is_out else (buffer, staging)
        queue.put(lambda: target.copy_(source, non_blocking=True))
        self.cuda.wait_for(queue.mark())

    def close(self) -> None:
        self.copier.close()
        self.proving.close()
        self.gpu.close()


def measure(clock: Clock, cuda: Cuda, round_count: int) -> list[dict[str, Any]]:
    """One row for each model and layout."""
    rows = []
    for model in MODELS:
        for layout in LAYOUTS:
            row: dict[str, Any] = {"model": model.name, "layout": layout}
            row |= _link(clock, Rig(clock, cuda, model, layout, BUFFER_BYTES), round_count)
            row |= _kernel(clock, Rig(clock, cuda, model, layout, 4 * KERNEL_BYTES), round_count)
            rows.append(row)
    return rows


def _link(clock: Clock, rig: Rig, round_count: int) -> dict[str, Any]:
    jobs = rig.jobs(rig.page_count)
    total_bytes = rig.page_count * rig.payload_bytes
    rates = _rates(
        clock,
        round_count,
        total_bytes,
        {
            "copy_out": lambda: rig.copy(True),
            "gather": jobs["gather"],
            "gather_verify": jobs["gather_verify"],
            "copy_in": lambda: rig.copy(False),
            "scatter": jobs["scatter"],
            "scatter_verify": jobs["scatter_verify"],
        },
    )
    submit_us = {
        name: round(_submit_us(clock, job, 20 * round_count), 1)
        for name, job in rig.jobs(1).items()
    }
    rig.close()
    return {
        "page_bytes": rig.payload_bytes,
        "link_gb_per_s": _rounded(rates),
        "link_ratios": {
            name: round(rates[name] / rates["copy_out" if "gather" in name else "copy_in"], 3)
            for name in jobs
        },
        "submit_one_page_us": submit_us,
    }


def _submit_us(clock: Clock, job: Callable[[], float], round_count: int) -> float:
    times_s = []
    for _ in range(round_count):
        started_s = clock.now_s()
        times_s.append(job() - started_s)
    return statistics.median(times_s) * 1e6


def _kernel(clock: Clock, rig: Rig, round_count: int) -> dict[str, Any]:
    """The kernels over one large chunk, many pages at once."""
    slice_count = rig.page_count * rig.model.head_count
    ids = [id_ for page in rig.pages(rig.page_count) for id_ in page.blocks]
    slip = rig.cuda.slip(array("q", [*[0] * (2 * slice_count), *ids]))
    queue = rig.gpu.lane(True).kernels
    source, target = (rig.cuda.buffer(KERNEL_BYTES) for _ in range(2))

    def timed(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            queue.put(work)
            rig.cuda.wait_for(queue.mark())

        return run

    address, page_blocks = target.data_ptr(), rig.page_blocks
    move, prove = rig.copier.mover.move, rig.proving.prover.prove
    blocks = slip[2 * slice_count :]
    verbs = {
        "gather": timed(lambda: move(True, blocks, address, page_blocks)),
        "scatter": timed(lambda: move(False, blocks, address, page_blocks)),
    }
    checksums = {"checksums": timed(lambda: prove(slip, slice_count, address, page_blocks, False))}
    moved_bytes = 2 * rig.page_count * rig.payload_bytes
    rates = _rates(clock, round_count, moved_bytes, verbs)
    copy = {"copy": timed(lambda: target.copy_(source))}
    rates |= _rates(clock, round_count, 2 * KERNEL_BYTES, copy)
    rates |= _rates(clock, round_count, moved_bytes // 2, checksums)
    rig.close()
    return {
        "kernel_gb_per_s": _rounded(rates),
        "kernel_ratios": {
            name: round(rates[name] / rates["copy"], 3) for name in (*verbs, *checksums)
        },
    }


def _rates(
    clock: Clock, round_count: int, moved_bytes: int, verbs: dict[str, Callable[[], Any]]
) -> dict[str, float]:
    """Medians, the verbs in turn, after a round that does not count."""
    times_s: dict[str, list[float]] = {name: [] for name in verbs}
    for _ in range(round_count + 1):
        for name, verb in verbs.items():
            started_s = clock.now_s()
            verb()
            times_s[name].append(clock.now_s() - started_s)
    return {
        name: moved_bytes / statistics.median(found[1:]) / 1e9 for name, found in times_s.items()
    }


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(rate, 1) for name, rate in rates.items()}
