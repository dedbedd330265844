"""The native core: C++ behind nanobind. Everything releases the GIL while it works.

Addresses are absolute and trusted: the Python layer owns the memory behind them and keeps it
alive until the work that names it has been returned. Lengths, alignments and counts are checked
when a call comes in: ValueError says which. A pool raises RuntimeError after `close` and in a
forked child (threads do not survive a fork: make pools after it).

Threads: any thread may call anything. The pools' own threads never touch the interpreter, so a
pool may be closed, or left behind, at any moment of its life.
"""

from collections.abc import Sequence

def checksum(address: int, length_bytes: int) -> int:
    """64-bit checksum of `length_bytes` (a multiple of 4,096) at `address` (a multiple of 8):
    docs/formats.md. `kvferry.checksum.checksum_reference` is the same in Python."""

def sha256_portable(data: bytes) -> bytes:
    """SHA-256 without the machine's instructions for it: what `chain_keys` falls back to."""

def chain_keys(
    namespace: bytes, parent: bytes, tokens: bytes, chunk_tokens: int, extras: Sequence[bytes]
) -> bytes:
    """Keys of the full chunks in `tokens` (uint32 little-endian), 32 bytes each, concatenated.
    `extras`: encoded extra keys, one per full chunk (b"" for none). See `keys.chunk_key`. Keeps
    the GIL for up to 4 KiB of tokens."""

class BlockMap:
    """Where the blocks of one cache group lie on this rank, and how a slice is laid out.

    An extent is `head_count` slices, `slice_bytes` apart; its address is that of its first
    header. Order in a payload: layer, block, kernel block, token, content. Immutable.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int, int, int, int, int, int]],
        head_count: int,
        header_bytes: int,
        slice_bytes: int,
    ) -> None:
        """`layers`: (base_address, kernel_blocks, block_tokens, content_bytes,
        block_stride_bytes, head_stride_bytes, token_stride_bytes) as in `layout.Region`."""

    def gather(self, blocks: Sequence[int], address: int) -> None:
        """Blocks to an extent, now, on this thread. Fills each payload with zeros up to
        `slice_bytes` and leaves headers alone. ValueError for a negative block, and for more
        blocks than fit a slice; that a block exists is the caller's word."""

    def scatter(self, blocks: Sequence[int], address: int) -> None:
        """An extent to blocks, now, on this thread. A negative block is skipped."""

class CopyPool:
    """Threads that gather and scatter, in the order of submission, a piece at a time.

    A piece is (blocks, address) as `BlockMap` takes them. Numbers of jobs start at 1.
    """

    def __init__(self, thread_count: int) -> None:
        """Starts the threads."""

    def submit(
        self, map: BlockMap, is_gather: bool, pieces: Sequence[tuple[Sequence[int], int]]
    ) -> int:
        """Starts a job; returns its number. The pool keeps its own copy of the map."""

    def poll(self) -> list[int]:
        """Jobs done since the last poll, each exactly once. Never waits."""

    def finish(self, jobs: Sequence[int], timeout_s: float) -> bool:
        """Returns True when these jobs are done, False if time ran out. The caller's thread
        copies what they still have in the queue, before all other jobs. `poll` still returns
        them; a job that it has returned is done."""

    def close(self) -> None:
        """Finishes what was submitted and ends the threads. Idempotent."""

class IoPool:
    """Threads that read and write extents of files, stamp headers and verify them.

    Reads and writes have threads of their own, so reads never wait behind writes; they are five
    levels nicer than the process. Several threads share an extent unless its I/O is direct, in
    parts of 1 MiB or one slice, whichever is more. An operation is (descriptor, offset_bytes,
    buffer_address, first_slice, slice_count, slice_bytes, payload_bytes, header); offset, address
    and `slice_bytes` are multiples of 4,096. `header`: the template of the page's headers
    (`pages.header.template`, 256 bytes or more; zeros follow), in which the pool fills in slice
    index and checksums. Numbers of jobs start at 1.

    From submit on, the buffer belongs to the pool until the operation's result was returned. The
    caller keeps the descriptor open as long.
    """

    def __init__(self, read_thread_count: int, write_thread_count: int) -> None:
        """Starts the threads."""

    def submit_reads(self, operations: Sequence[tuple], verify_payload: bool) -> int:
        """Reads each extent and checks the headers of all slices against the template (magic,
        version, namespace, key, generation, slice index and count, payload bytes), then the
        checksums of payloads unless `verify_payload` is False. The first slice that fails decides
        the outcome, and then no checksums are returned. One system call for an extent with direct
        I/O, else one for each 256 KiB of a slice. Returns the job's number."""

    def submit_writes(self, operations: Sequence[tuple], checksums: Sequence[int] | None) -> int:
        """Stamps a header in front of each payload and writes each extent. `checksums`: of the
        padded payloads, of all slices of all operations in order; None: the pool computes them,
        with buffered I/O piece by piece as it writes, and then writes the header last. Returns
        the job's number."""

    def limit_reads(self, thread_count: int) -> None:
        """So many threads read at most from now on; those that are at it end what they have
        begun, a part of an extent."""

    @property
    def reading_count(self) -> int:
        """Threads that read right now."""

    def poll(self) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """(job, index of the operation, outcome code, errno, payload checksums), each exactly
        once. The code is the place in `pages.base.Outcome`. Never waits."""

    def wait(self, timeout_s: float) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """As poll, but waits up to `timeout_s` for results: for a few while more is out, so that
        not each of them wakes the caller."""

    def close(self, timeout_s: float) -> bool:
        """Waits for all that was submitted; `poll` and `wait` still return it. False if time ran
        out: operations that had not begun are dropped, threads that hang are left behind with
        their buffers, neither is ever returned. Idempotent; it may be called again to ask whether
        they have come back. Without `close`, the end of the pool is `close(0)`."""

class Hf3fs:
    """The library of 3FS, loaded for good. Any thread."""

    @staticmethod
    def load(path: str) -> Hf3fs:
        """Raises RuntimeError with the loader's words, or the name of a function that it lacks."""

    def mount_point(self, path: str) -> str | None:
        """The mount that an existing path is on; None: not 3FS."""

    def register_file(self, descriptor: int) -> None:
        """The library keeps a duplicate until `deregister_file`. Raises OSError."""

    def deregister_file(self, descriptor: int) -> None:
        """Before the descriptor is closed."""

    def punch_hole(self, descriptor: int, start: int, end: int) -> None:
        """Both at multiples of the file's chunk size. Raises OSError."""

class UsrbioPool:
    """As IoPool, for files on 3FS: a thread and a ring of its own for each of the counts.

    An I/O ends at a multiple of `io_bytes_max` in its file; `entry_max` of them and
    `ring_bytes_max` bytes are out in one ring (an operation of more is out alone). After
    `io_deadline_s` an I/O is overdue: it no longer counts, and its operation is not returned until
    it is answered. After `ring_deadline_s` its ring is ended, another one made, and the operation
    returned with ETIMEDOUT. Descriptors must be registered with the library.
    """

    def __init__(
        self,
        library: Hf3fs,
        mount_point: str,
        read_thread_count: int,
        write_thread_count: int,
        entry_max: int,
        ring_bytes_max: int,
        io_bytes_max: int,
        io_deadline_s: float,
        ring_deadline_s: float,
    ) -> None:
        """Makes the rings and starts the threads. Raises OSError."""

    def add_memory(self, address: int, length_bytes: int, id: bytes) -> None:
        """Memory that buffers may lie in; `id`: the 16 bytes that its link in the mount is named
        by. Raises OSError."""

    def remove_memory(self, address: int) -> None:
        """Only of memory without I/O."""

    def submit_reads(self, operations: Sequence[tuple], verify_payload: bool) -> int:
        """As IoPool. Raises ValueError for a buffer in no memory of this pool."""

    def submit_writes(self, operations: Sequence[tuple], checksums: Sequence[int] | None) -> int:
        """As IoPool, headers and payloads at once. Raises ValueError likewise."""

    def poll(self) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """As IoPool."""

    def wait(self, timeout_s: float) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """As IoPool."""

    def close(self, timeout_s: float) -> bool:
        """Waits so long for all that was submitted, then ends the rings with what is in them. False
        if a thread does not come back from the library: it is left behind with its ring."""

    overdue_count: int
    """I/Os that were overdue, so far."""

    overdue_now_count: int
    """Those that still are."""
