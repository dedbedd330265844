"""Pages on 3FS through its user-space ring I/O (USRBIO): the same segments, headers and proofs as
`posix`, moved past the kernel at the speed of the network card.

Life: the library and the mount are found; left-overs of killed processes are swept; rings are made,
one for each I/O thread; one read is tried, which shows whether the daemon has this process's
memory. At the end the threads end their rings, then files are deregistered and closed, then memory
is taken from the daemon. There is no way back to `posix`: what is missing is a ConfigError with a
cure.

Facts of 3FS that decide: it has no preallocation, so segments are sparse; a hole reads as an error
(a flag), so a page that was never written is absent; a part of a chunk that is written costs the
daemon the whole chunk, so `alignment_bytes` should be the chunk size of the folder.
"""

import errno
import logging
import os
from pathlib import Path

from kvferry._native import UsrbioPool
from kvferry.clock import Clock
from kvferry.errors import ConfigError, InternalError, UnavailableError
from kvferry.layout import PageGeometry
from kvferry.pages import files, header
from kvferry.pages.base import Outcome, Overdue, PageId, StoreFacts
from kvferry.pages.descriptors import Descriptors
from kvferry.pages.facts import Asked
from kvferry.pages.file_pages import DESCRIPTOR_MAX, FilePages
from kvferry.pages.hf3fs import Mount, find_mount, keep_from_children
from kvferry.pages.segments import SUPERBLOCK
from kvferry.pages.shared_memory import SharedMemory, sweep
from kvferry.pages.threads import read_threads, write_threads

log = logging.getLogger(__name__)

IO_BYTES = 4 << 20
"""An I/O has at most so many bytes, or one chunk of the file."""
RING_BYTES_MAX = 32 << 20
ENTRY_MAX = 128
IO_DEADLINE_S = 30.0
RING_DEADLINE_S = 150.0
_TRIAL_S = 5.0
_TRIAL_CLOSE_S = 2.0
_TRIAL_COUNT = 3
_NOT_ALLOWED = (errno.EACCES, errno.EPERM)
_CHUNK_BYTES_MIN = 64 << 10
FILES_OPEN = 2 * DESCRIPTOR_MAX + 256
"""How many files may be open: 3FS keeps a second descriptor of each segment."""

_TRIAL_PAGE = PageId(bytes(32), bytes(32), bytes(32), 0, 0, bytes(16))
_TRIAL_GEOMETRY = PageGeometry(1, 4096, 1)


class UsrbioPages(FilePages):
    """A `PageStore` in a folder of a mounted 3FS. Staging must come from `allocate`: the daemon
    moves bytes to and from it. `library`: path of libhf3fs_api_shared.so; None: the usual places.

    `io_deadline_s`: a later I/O no longer counts as in flight; its buffer stays out of use.
    `ring_deadline_s`: then its ring is ended, the operation has failed, and the buffer is back."""

    def __init__(
        self,
        root: Path,
        clock: Clock,
        asked: Asked,
        *,
        library: str | None = None,
        read_thread_count: int | None = None,
        write_thread_count: int | None = None,
        descriptor_max: int = DESCRIPTOR_MAX,
        ring_bytes_max: int = RING_BYTES_MAX,
        io_deadline_s: float = IO_DEADLINE_S,
        ring_deadline_s: float = RING_DEADLINE_S,
    ):
        super().__init__(root, clock, asked, is_sparse=True)
        self.direct_io = True  # the page cache has no part in it
        self._clock = clock
        self._library = library
        self._read_thread_count = read_thread_count or read_threads()
        self._write_thread_count = write_thread_count or write_threads(is_direct=True)
        self._descriptor_max = descriptor_max
        self._ring_bytes_max = ring_bytes_max
        self._io_deadline_s = io_deadline_s
        self._ring_deadline_s = ring_deadline_s
        self._mount: Mount | None = None
        self._memories: list[SharedMemory] = []
        self._process = -1

    def overdue(self) -> Overdue:
        pool = self._open_pool()
        return Overdue(pool.overdue_now_count, pool.overdue_count)

    def leave_room(self, is_wanted: bool) -> None:
        """Its threads wait for a daemon that copies."""

    def open(self) -> StoreFacts:
        if self._pool is None:
            with files.system_errors("open", self._root):
                self._mount = find_mount(self._root, self._library, FILES_OPEN)
                return super().open()
        return super().open()

    def close(self) -> None:
        """In a forked child the library is not called: threads that are not there may hold its
        locks. Files stay open there, since their numbers stay registered."""
        if self._pool is not None and self._process != os.getpid():
            self._pool = None
            self._stop(is_quiet=True)
        super().close()

    def allocate(self, length_bytes: int) -> tuple[int, object]:
        memory = self._share(self._open_pool(), length_bytes)
        return memory.address, memory.memory

    def register(self, address: int, length_bytes: int) -> None:
        if not any(_holds(memory, address, length_bytes) for memory in self._memories):
            raise InternalError("pages.foreign_memory", "this memory is not from `allocate`")
        super().register(address, length_bytes)

    def _start(self) -> tuple[UsrbioPool, Descriptors]:
        self._process = os.getpid()
        mount, alignment_bytes = self._mount, self._segments.facts.alignment_bytes
        if alignment_bytes < _CHUNK_BYTES_MIN:
            log.warning(
                "alignment_bytes is %s: slots share chunks of 3FS, and writes cost more",
                alignment_bytes,
            )
        swept_count = sweep(mount.point)
        if swept_count:
            log.info("removed %s left-overs of killed processes from /dev/shm", swept_count)
        pool = self._make_pool(mount, alignment_bytes)
        try:
            keep_from_children(mount.point)
            self._try(pool)
        except BaseException:
            self._stop(is_quiet=pool.close(_TRIAL_CLOSE_S))
            raise
        library = mount.library
        descriptors = Descriptors(
            self._segments,
            os.O_RDWR,
            self._descriptor_max,
            library.register_file,
            library.deregister_file,
        )
        return pool, descriptors

    def _stop(self, is_quiet: bool) -> None:
        """What hangs keeps its memory: the daemon may still write to it."""
        memories, self._memories = self._memories, []
        if is_quiet:
            for memory in memories:
                memory.close()

    def _make_pool(self, mount: Mount, alignment_bytes: int) -> UsrbioPool:
        try:
            return UsrbioPool(
                mount.library,
                mount.point,
                self._read_thread_count,
                self._write_thread_count,
                ENTRY_MAX,
                self._ring_bytes_max,
                max(IO_BYTES, alignment_bytes),
                self._io_deadline_s,
                self._ring_deadline_s,
            )
        except OSError as error:
            raise ConfigError(
                "pages.rings",
                f"the 3FS daemon gives no rings for {mount.point}: {error.strerror}: look whether "
                "hf3fs_fuse_main runs and has this host's /dev/shm, and at its iov_limit",
                errno=error.errno,
            ) from error
        except RuntimeError as error:
            raise UnavailableError(
                "pages.threads",
                f"too few threads for I/O: {error}: "
                "raise the limit of processes (ulimit -u, the container's pids limit)",
            ) from error

    def _share(self, pool: UsrbioPool, length_bytes: int) -> SharedMemory:
        memory = SharedMemory(self._mount.point, length_bytes, self._clock)
        memory.open()
        self._memories.append(memory)
        pool.add_memory(memory.address, length_bytes, memory.id)
        return memory

    def _try(self, pool: UsrbioPool) -> None:
        """Reads the superblock through a ring. What comes does not matter, only that it comes: what
        may pass is tried again."""
        memory = self._share(pool, _TRIAL_GEOMETRY.page_bytes)
        library = self._mount.library
        descriptor = os.open(self._root / SUPERBLOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            library.register_file(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _not_registered(error, self._root) from error
        is_answered = False
        try:
            for _ in range(_TRIAL_COUNT):
                error_number = self._try_once(pool, descriptor, memory.address)
                if error_number in (0, *_NOT_ALLOWED):
                    break
            is_answered = True
        finally:  # a read that is still out keeps the file until its ring is ended
            if is_answered or pool.close(_TRIAL_CLOSE_S):
                library.deregister_file(descriptor)
                os.close(descriptor)
        if error_number:
            raise _refused(error_number, self._mount.point)
        pool.remove_memory(memory.address)
        self._memories.remove(memory)
        memory.close()

    def _try_once(self, pool: UsrbioPool, descriptor: int, address: int) -> int:
        template = header.template(_TRIAL_PAGE, _TRIAL_GEOMETRY)
        sizes = (1, _TRIAL_GEOMETRY.slice_bytes, _TRIAL_GEOMETRY.payload_bytes)
        pool.submit_reads([(descriptor, 0, address, 0, *sizes, template)], True)
        results = pool.wait(_TRIAL_S)
        if not results:
            raise UnavailableError(
                "pages.silent",
                f"the 3FS daemon of {self._mount.point} has not answered in {_TRIAL_S:.0f} s: "
                "look whether hf3fs_fuse_main and the storage behind it are well",
            )
        _, _, code, error_number, _ = results[0]
        return error_number if tuple(Outcome)[code] is Outcome.IO_ERROR else 0


def _holds(memory: SharedMemory, address: int, length_bytes: int) -> bool:
    end = memory.address + memory.length_bytes
    return memory.address <= address and address + length_bytes <= end


def _not_registered(error: OSError, root: Path) -> ConfigError | OSError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return error
    return ConfigError(
        "pages.registration",
        f"3FS does not take a file of {root}: {error.strerror}: the folder must be on the mount "
        "itself, not on another file system mounted above it",
        errno=error.errno,
    )


def _refused(error_number: int, mount_point: str) -> ConfigError | UnavailableError:
    reason = f"a read through the 3FS daemon of {mount_point} fails: {os.strerror(error_number)}"
    details = {"errno": error_number}
    if error_number in _NOT_ALLOWED:
        cure = (
            f"the daemon must run as user {os.geteuid()} and have the same /dev/shm (Kubernetes: a "
            "hostPath volume; docker: -v /dev/shm:/dev/shm or --ipc=host)"
        )
        return ConfigError("pages.daemon", f"{reason}: {cure}", **details)
    return UnavailableError("pages.io", reason, **details)
