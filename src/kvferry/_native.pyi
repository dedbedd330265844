"""The native core: C++ behind nanobind. Everything releases the GIL while it works.

Addresses are absolute and trusted: the Python layer owns the memory behind them and keeps it
alive until the work that names it has been returned.
"""

from collections.abc import Sequence

def checksum(address: int, length_bytes: int) -> int:
    """64-bit checksum of `length_bytes` (a multiple of 4096) at `address`: docs/formats.md."""

def chain_keys(
    namespace: bytes, parent: bytes, tokens: bytes, chunk_tokens: int, extras: Sequence[bytes]
) -> bytes:
    """Keys of the full chunks in `tokens` (uint32 little-endian), 32 bytes each, concatenated.
    `extras`: encoded extra keys, one per chunk (b"" for none). See `keys.chunk_key`."""

class BlockMap:
    """Where the blocks of one cache group lie on this rank, and how a slice is laid out."""

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
        """Now, on this thread. Zero-fills each payload up to `slice_bytes`."""

    def scatter(self, blocks: Sequence[int], address: int) -> None:
        """Now, on this thread. A negative block is skipped."""

class CopyPool:
    """Threads that gather and scatter. Numbers of jobs start at 1."""

    def __init__(self, thread_count: int) -> None: ...
    def submit(
        self, map: BlockMap, is_gather: bool, pieces: Sequence[tuple[Sequence[int], int]]
    ) -> int: ...
    def poll(self) -> list[int]: ...
    def finish(self, jobs: Sequence[int], timeout_s: float) -> bool: ...
    def close(self) -> None: ...

class IoPool:
    """Threads that read and write extents of files, stamp and verify headers.

    Reads are taken before writes. An operation is (descriptor, offset_bytes, buffer_address,
    first_slice, slice_count, slice_bytes, payload_bytes, header) with `header` the 4 KiB-less
    header template of the page (`pages.header`), whose slice index and checksums the pool fills
    in (write) or compares (read).
    """

    def __init__(self, read_thread_count: int, write_thread_count: int) -> None: ...
    def submit_reads(self, operations: Sequence[tuple], verify_payload: bool) -> int: ...
    def submit_writes(self, operations: Sequence[tuple], checksums: Sequence[int] | None) -> int: ...
    def poll(self) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """(job, index, outcome code, errno, payload checksums) each exactly once."""

    def wait(self, timeout_s: float) -> list[tuple[int, int, int, int, tuple[int, ...]]]: ...
    def close(self, timeout_s: float) -> bool:
        """Waits for what is in flight; False if something hangs (its threads are left behind)."""
