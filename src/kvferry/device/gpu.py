"""Copier for GPU memory: a kernel between blocks and a buffer of the GPU, the copy engine between
that buffer and pinned staging.

    gather    blocks -kernel-> chunk of the buffer -copy engine-> staging
    scatter   staging -copy engine-> chunk of the buffer -kernel-> blocks

A second kernel computes the checksums of what is in a chunk: after a gather while it is copied out,
before a scatter as a gate that a damaged piece does not pass. The host reads them when all is done.

Each direction is a lane: a queue for kernels, one for copies, and a ring of chunks, so that the
kernel of one batch runs while the bytes of another are copied. Everything is ordered on the device
by marks in queues; the host only asks whether a mark was passed. The engine's own queue waits for
nothing but the kernels of gathers that a fence names.

Staging is pinned, and the kernels are compiled, in the background. Until then jobs are held back:
copies of memory that is not pinned would stop the host.
"""

import contextlib
import ctypes
import itertools
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvferry.device.base import SKIP, Done, Piece
from kvferry.device.batch import Batch
from kvferry.device.kernels import BlockMover, SliceProver
from kvferry.errors import ConfigError, UnavailableError
from kvferry.layout import PageGeometry, Region

CHUNKS_PER_LANE = 2
CLOSE_S = 60.0
SLIP_WORDS = (32, 64, 128, 256, 512, 1024, 2048)
SLIPS_READY = 16
"""Of each length: memory that is pinned when a job needs it takes a millisecond, and stops the
engine's own calls to the driver meanwhile."""
Mark = Any


class CudaQueue:
    """Work of the device in one order: a stream. `put` runs what enqueues the work."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def put(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        """Passed when all that was put so far is done."""
        return self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """What is put from now on runs after the mark was passed."""
        self._stream.wait_event(mark)


class Cuda:
    """One GPU as the copier sees it: memory, queues, marks. Raises UnavailableError if the driver
    refuses something."""

    def __init__(self, device: torch.device):
        self.device = device

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def queue(self) -> CudaQueue:
        """A new queue, preferred to the engine's where both have work: ours is short."""
        return CudaQueue(torch.cuda.Stream(self.device, priority=-1))

    def engine_queue(self) -> CudaQueue:
        """The queue of the calling thread, as the engine has set it."""
        return CudaQueue(torch.cuda.current_stream(self.device))

    def has_passed(self, mark: Mark) -> bool:
        return mark.query()

    def wait_for(self, mark: Mark) -> None:
        """Blocks the host."""
        mark.synchronize()

    def buffer(self, length_bytes: int) -> torch.Tensor:
        return torch.zeros(length_bytes, dtype=torch.uint8, device=self.device)

    def memory(self, length_bytes: int) -> tuple[int, object]:
        """For staging in GPU memory: see `staging.Allocate`. Other processes can be let into it."""
        memory = self.buffer(length_bytes)
        torch.cuda.current_stream(self.device).synchronize()
        return memory.data_ptr(), memory

    def zero(self, address: int, length_bytes: int) -> None:
        """On the current queue."""
        torch.as_tensor(_Bytes(address, length_bytes), device=self.device).zero_()

    def slip(self, words: array) -> torch.Tensor:
        """8-byte words in pinned memory, which kernels read and write in place. Reused once nobody
        refers to it."""
        return torch.frombuffer(words, dtype=torch.int64).pin_memory()

    def pin(self, address: int, length_bytes: int) -> None:
        with torch.cuda.device(self.device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, length_bytes, 0))
        if error:
            raise UnavailableError(
                "device.pinning",
                f"CUDA cannot pin {length_bytes} bytes of staging (error {error}): lower"
                " staging_bytes, or give the process more memory that may be locked",
            )

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class _Bytes:
    """Memory of a GPU by its address, for torch."""

    def __init__(self, address: int, length_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def first_gpu() -> torch.device:
    """For what may run on any GPU. Raises UnavailableError if there is none."""
    if not torch.cuda.is_available():
        raise UnavailableError("device.no_gpu", "torch finds no NVIDIA GPU here")
    return torch.device("cuda", 0)


@dataclass(slots=True)
class _Chunk:
    """A part of the buffer. `last_use`: when that was passed, it is free."""

    memory: torch.Tensor
    last_use: Mark = None


@dataclass(slots=True, eq=False)
class _Job:
    """`blocks_free`: passed when the blocks have been read or written; `done`: staging too."""

    number: int
    is_gather: bool
    pieces: tuple[Piece, ...]
    batches: list[Batch] = field(default_factory=list)
    blocks_free: Mark = None
    done: Mark = None

    def result(self) -> Done:
        """Once the last mark was passed."""
        if self.is_gather:
            found = sorted(sums for batch in self.batches for sums in batch.found())
            return Done(self.number, checksums=tuple(tuple(array("Q", s)) for _, s in found))
        return Done(self.number, tuple(i for batch in self.batches for i in batch.failed()))


class _Lane:
    """One direction: see the module. Whoever uses it holds the lock of its `Gpu`."""

    def __init__(self, cuda: Cuda, chunk_bytes: int):
        self.kernels = cuda.queue()
        self.copies = cuda.queue()
        chunks = [_Chunk(cuda.buffer(chunk_bytes)) for _ in range(CHUNKS_PER_LANE)]
        is_taken = cuda.engine_queue().mark()
        self.kernels.wait(is_taken)
        self.copies.wait(is_taken)
        self._ring = itertools.cycle(chunks)

    def next_chunk(self, first_user: CudaQueue) -> _Chunk:
        """The chunk whose turn it is, for `first_user`'s work to come."""
        chunk = next(self._ring)
        if chunk.last_use is not None:
            first_user.wait(chunk.last_use)
        return chunk


class Gpu:
    """What the copiers of one worker share: pinned staging, the buffer, the lanes.

    `staging_address`, `staging_bytes`: the caller's, valid until `close`. `buffer_bytes`: of GPU
    memory, half for each direction. `lock` guards all that is mutable, in the copiers too.
    """

    def __init__(self, cuda: Cuda, staging_address: int, staging_bytes: int, buffer_bytes: int):
        self.cuda = cuda
        self.chunk_bytes = buffer_bytes // (2 * CHUNKS_PER_LANE)
        self.lock = threading.RLock()
        self._staging_address = staging_address
        self._staging_bytes = staging_bytes
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = True  # until the background has done its part
        self._is_pinned = False

    def open(self, warm_ups: Sequence[Callable[[], None]] = ()) -> None:
        """Takes the buffer, and pins and warms up in the background."""
        self._gathers = _Lane(self.cuda, self.chunk_bytes)
        self._scatters = _Lane(self.cuda, self.chunk_bytes)
        self.staging = torch.frombuffer(
            (ctypes.c_char * self._staging_bytes).from_address(self._staging_address),
            dtype=torch.uint8,
        )
        self._thread = threading.Thread(
            target=self._prepare, args=(warm_ups,), name="kvferry-pinning", daemon=True
        )
        self._thread.start()

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Whether jobs can start; waits for it. Raises UnavailableError if they never will."""
        is_ready = self._ready.wait(timeout_s) if timeout_s else self._ready.is_set()
        if is_ready and self._has_failed:
            raise UnavailableError("device.not_ready", "pinning or compiling failed, see the log")
        return is_ready

    def close(self) -> None:
        """After the copiers. Idempotent."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            self._thread = None
        if self._is_pinned:
            self.cuda.unpin(self._staging_address)
            self._is_pinned = False

    def _prepare(self, warm_ups: Sequence[Callable[[], None]]) -> None:
        """What goes wrong is also on standard error, as of any thread."""
        try:
            self.cuda.pin(self._staging_address, self._staging_bytes)
            self._is_pinned = True
            for words in (array("q", bytes(8 * count)) for count in SLIP_WORDS):
                _ = [self.cuda.slip(words) for _ in range(SLIPS_READY)]
            for warm_up in warm_ups:
                warm_up()
            self._has_failed = False
        finally:
            self._ready.set()

    def lane(self, is_gather: bool) -> _Lane:
        return self._gathers if is_gather else self._scatters

    def copy(self, batch: Batch, chunk: _Chunk, extent_bytes: int, is_out: bool) -> None:
        """Enqueues the copies of a batch, one for each run of adjacent extents, on the current
        queue: from the chunk to staging (`is_out`), or back."""
        for first, count in _adjacent(batch.addresses, extent_bytes):
            start = batch.addresses[first] - self._staging_address
            length_bytes = count * extent_bytes
            outside = self.staging[start : start + length_bytes]
            inside = chunk.memory[first * extent_bytes :][:length_bytes]
            if is_out:
                outside.copy_(inside, non_blocking=True)
            else:
                inside.copy_(outside, non_blocking=True)


class GpuCopier:
    """Gathers and scatters one cache group's blocks of one rank. See `base`.

    `regions` in layer order; they must stay valid until `close`. Raises ConfigError if one extent
    does not fit into a chunk of the GPU's buffer.
    """

    def __init__(
        self,
        gpu: Gpu,
        regions: Sequence[Region],
        geometry: PageGeometry,
        *,
        proves_pages: bool = True,
    ):
        self.proves_pages = proves_pages
        self._gpu = gpu
        self._geometry = geometry
        self._block_bytes = sum(region.block_head_bytes for region in regions)
        self._head_count = regions[0].head_count
        self._extent_bytes = self._head_count * geometry.slice_bytes
        self.mover = BlockMover(regions, geometry, gpu.cuda.device)
        self.prover = SliceProver(self._head_count, geometry)
        self._numbers = itertools.count(1)
        self._held: deque[_Job] = deque()
        self._under_way: dict[bool, deque[_Job]] = {True: deque(), False: deque()}
        self._engine_marks: dict[bool, Mark] = {}
        if self._extent_bytes > gpu.chunk_bytes:
            least_bytes = 2 * CHUNKS_PER_LANE * self._extent_bytes
            raise ConfigError(
                "gpu_buffer_too_small",
                f"gpu_buffer_bytes is too small for pages of this model: set it to at least"
                f" {least_bytes}",
                key="gpu_buffer_bytes",
            )

    def open(self) -> None:
        """Nothing: the `Gpu` is opened by whoever made it."""

    def warm_up(self) -> None:
        """Compiles the kernels: they move no block. Before any job starts."""
        checksums = (0,) * self._head_count if self.proves_pages else None
        for is_gather in (True, False):
            lane = self._gpu.lane(is_gather)
            batch = self._batch(is_gather, [(0, Piece((SKIP,), 0, checksums))])
            chunk = lane.next_chunk(lane.kernels)
            lane.kernels.put(partial(self._prove, batch, chunk, not is_gather))
            lane.kernels.put(partial(self._move, batch, chunk, is_gather))
            self._gpu.cuda.wait_for(lane.kernels.mark())

    def close(self) -> None:
        """Waits on the host for what was submitted. Idempotent."""
        with contextlib.suppress(UnavailableError):
            self._gpu.is_ready(timeout_s=CLOSE_S)
            self._start_held()
        for jobs in self._under_way.values():
            while jobs:
                self._gpu.cuda.wait_for(jobs.popleft().done)

    def order_gathers(self) -> None:
        self._order(True)

    def order_scatters(self) -> None:
        self._order(False)

    def submit_gather(self, pieces: Sequence[Piece]) -> int:
        if any(block < 0 for piece in pieces for block in piece.blocks):
            raise ValueError("a gather needs all of its blocks")
        return self._submit(True, pieces)

    def submit_scatter(self, pieces: Sequence[Piece]) -> int:
        for checksums in (piece.checksums for piece in pieces if piece.checksums is not None):
            if not self.proves_pages or len(checksums) != self._head_count:
                raise ValueError("no pages are proven here, or not all slices have a checksum")
        return self._submit(False, pieces)

    def poll(self) -> list[Done]:
        self._start_held()
        with self._gpu.lock:
            return [job.result() for jobs in self._under_way.values() for job in self._done(jobs)]

    def finish(self, jobs: Iterable[int], timeout_s: float) -> bool:
        """Waits on the host only while staging is not pinned yet."""
        wanted = set(jobs)
        if self._held:
            self._gpu.is_ready(timeout_s)
        self._start_held()
        engine = self._gpu.cuda.engine_queue()
        with self._gpu.lock:
            if not wanted.isdisjoint(job.number for job in self._held):
                return False
            for under_way in self._under_way.values():
                last = next((job for job in reversed(under_way) if job.number in wanted), None)
                if last is not None:
                    engine.wait(last.blocks_free)
        return True

    def _order(self, is_gather: bool) -> None:
        mark = self._gpu.cuda.engine_queue().mark()
        with self._gpu.lock:
            self._engine_marks[is_gather] = mark

    def _submit(self, is_gather: bool, pieces: Sequence[Piece]) -> int:
        for piece in pieces:
            if len(piece.blocks) * self._block_bytes > self._geometry.padded_payload_bytes:
                raise ValueError("more blocks than a slice has room for")
        job = _Job(next(self._numbers), is_gather, tuple(pieces))
        with self._gpu.lock:
            self._held.append(job)
        self._start_held()
        return job.number

    def _start_held(self) -> None:
        if not self._held or not self._gpu.is_ready():
            return
        with self._gpu.lock:
            while self._held:
                job = self._held.popleft()
                self._start(job)
                self._under_way[job.is_gather].append(job)

    # Under the lock

    def _start(self, job: _Job) -> None:
        lane = self._gpu.lane(job.is_gather)
        engine_mark = self._engine_marks.get(job.is_gather)
        if engine_mark is not None:
            lane.kernels.wait(engine_mark)
        is_complete = False
        try:
            for batch in self._batches(job):
                job.batches.append(batch)
                if job.is_gather:
                    self._gather(job, lane, batch)
                else:
                    self._scatter(job, lane, batch)
            is_complete = True
        finally:
            if not is_complete:  # the caller will give the blocks to others
                self._gpu.cuda.wait_for(lane.kernels.mark())
                self._gpu.cuda.wait_for(lane.copies.mark())

    def _gather(self, job: _Job, lane: _Lane, batch: Batch) -> None:
        chunk = lane.next_chunk(lane.kernels)
        if batch.block_count * self._block_bytes < self._geometry.padded_payload_bytes:
            lane.kernels.put(chunk.memory.zero_)
        lane.kernels.put(partial(self._move, batch, chunk, True))
        job.blocks_free = lane.kernels.mark()
        lane.copies.wait(job.blocks_free)
        lane.copies.put(partial(self._gpu.copy, batch, chunk, self._extent_bytes, True))
        if batch.slice_count:
            lane.kernels.put(partial(self._prove, batch, chunk, False))
            lane.copies.wait(lane.kernels.mark())
        job.done = chunk.last_use = lane.copies.mark()

    def _scatter(self, job: _Job, lane: _Lane, batch: Batch) -> None:
        chunk = lane.next_chunk(lane.copies)
        lane.copies.put(partial(self._gpu.copy, batch, chunk, self._extent_bytes, False))
        lane.kernels.wait(lane.copies.mark())
        if batch.slice_count:
            lane.kernels.put(partial(self._prove, batch, chunk, True))
        lane.kernels.put(partial(self._move, batch, chunk, False))
        job.done = job.blocks_free = chunk.last_use = lane.kernels.mark()

    def _move(self, batch: Batch, chunk: _Chunk, is_gather: bool) -> None:
        self.mover.move(is_gather, batch.block_ids, chunk.memory.data_ptr(), batch.block_count)

    def _prove(self, batch: Batch, chunk: _Chunk, is_gate: bool) -> None:
        address = chunk.memory.data_ptr()
        self.prover.prove(batch.slip, batch.slice_count, address, batch.block_count, is_gate)

    def _batches(self, job: _Job) -> Iterator[Batch]:
        """As many pieces as a chunk holds, of one number of blocks, all to be proven or none."""
        capacity = self._gpu.chunk_bytes // self._extent_bytes

        def kind(place: tuple[int, Piece]) -> tuple[int, bool]:
            return len(place[1].blocks), place[1].checksums is None

        places = sorted(enumerate(job.pieces), key=lambda place: place[1].staging_address)
        for _, found in itertools.groupby(sorted(places, key=kind), kind):
            group = list(found)
            for start in range(0, len(group), capacity):
                yield self._batch(job.is_gather, group[start : start + capacity])

    def _batch(self, is_gather: bool, places: Sequence[tuple[int, Piece]]) -> Batch:
        """`places`: pieces with their places in the job."""
        indices, pieces = zip(*places, strict=True)
        expected = array("Q", (c for piece in pieces for c in piece.checksums or ())).tobytes()
        if is_gather and self.proves_pages:
            expected = bytes(8 * len(pieces) * self._head_count)
        words = array("q", bytes(len(expected)) + expected)
        words.extend(id_ for piece in pieces for id_ in piece.blocks)
        return Batch(
            indices,
            tuple(piece.staging_address for piece in pieces),
            len(pieces[0].blocks),
            expected,
            self._gpu.cuda.slip(words),
        )

    def _done(self, jobs: deque[_Job]) -> Iterator[_Job]:
        """Those at the head whose last mark was passed: a lane keeps its order."""
        while jobs and (jobs[0].done is None or self._gpu.cuda.has_passed(jobs[0].done)):
            yield jobs.popleft()


def _adjacent(addresses: Sequence[int], extent_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of extents that lie one after the other: index of the first, and how many."""
    first = 0
    for index in range(1, len(addresses) + 1):
        if index == len(addresses) or addresses[index] != addresses[index - 1] + extent_bytes:
            yield first, index - first
            first = index
