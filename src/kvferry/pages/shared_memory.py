"""Staging that a 3FS daemon maps as well: a file in /dev/shm, and a link to it in the mount.

    /dev/shm/kvferry-<pid>-<16 hex>       locked (flock) by the process that made it, while it lives
    <mount>/3fs-virt/iovs/<uuid>          made after the file, removed before it

The daemon maps the file when the link is made, and removes the links of a process that has ended.
What a killed process leaves in /dev/shm, the next one sweeps: a file whose lock is free. The lock,
not the process number, decides: containers may share /dev/shm and have numbers of their own.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvferry.clock import Clock
from kvferry.errors import ConfigError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "kvferry-"
_NOT_ALLOWED = {errno.EACCES, errno.EPERM}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_MOUNT_GONE = {errno.ENOTCONN, errno.ESTALE}


def _uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def iovs_folder(mount_point: str) -> Path:
    """Where the links of a mount are."""
    return Path(mount_point, "3fs-virt", "iovs")


class SharedMemory:
    """`length_bytes` of memory under a link of the mount. Any thread. `memory` keeps the mapping,
    also after `close`."""

    def __init__(self, mount_point: str, length_bytes: int, clock: Clock):
        self.id = clock.random_bytes(16)
        self.length_bytes = length_bytes
        self.address = 0
        self.memory: mmap.mmap | None = None
        self._file = SHARED_MEMORY / f"{PREFIX}{os.getpid()}-{clock.random_bytes(8).hex()}"
        self._link = iovs_folder(mount_point) / _uuid_text(self.id)
        self._lock = -1
        self._process = -1

    def open(self) -> None:
        """Raises ConfigError where there is no such memory, or the daemon cannot have it."""
        self._process = os.getpid()
        try:
            self._lock = os.open(SHARED_MEMORY, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._lock, 0, self.length_bytes)
            self.memory = mmap.mmap(self._lock, self.length_bytes)
            # Named when it is locked. Only with a `src_dir_fd` does Python follow the link in
            # /proc.
            os.link(f"/proc/self/fd/{self._lock}", self._file, src_dir_fd=self._lock)
        except OSError as error:
            self.close()
            raise ConfigError(*_no_memory(error, self.length_bytes)) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        try:
            os.symlink(self._file, self._link)
        except OSError as error:
            self.close()
            raise ConfigError(*_no_link(error, self._link)) from error

    def close(self) -> None:
        """Takes the memory from the daemon: no I/O may be out. Idempotent. In a forked child it
        only lets go of it."""
        if self._lock < 0:
            return
        if self._process == os.getpid():
            _remove(self._link)
            _remove(self._file)
        os.close(self._lock)
        self._lock = -1


def sweep(mount_point: str) -> int:
    """Removes what killed processes of this user left behind; returns how many files it was. A link
    to a file that is not in this /dev/shm may be of a living process with another one. Raises
    OSError if the mount's links cannot be listed."""
    left_over = [file for file in SHARED_MEMORY.glob(f"{PREFIX}*-*") if _is_left_over(file)]
    for link, target in _links(iovs_folder(mount_point)):
        if target in left_over:
            _remove(link)
    for file in left_over:
        _remove(file)
    return len(left_over)


def _is_left_over(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # gone, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _links(folder: Path) -> Iterator[tuple[Path, Path]]:
    for link in folder.iterdir():
        try:
            yield link, Path(os.readlink(link))
        except OSError:
            continue


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)


def _no_memory(error: OSError, length_bytes: int) -> tuple[str, str]:
    if error.errno == errno.ENOSPC:
        free_mib = os.statvfs(SHARED_MEMORY).f_bavail * os.statvfs(SHARED_MEMORY).f_frsize >> 20
        return (
            "pages.shm_size",
            f"{SHARED_MEMORY} has {free_mib} MiB free, and {length_bytes >> 20} MiB are needed for "
            "staging: give the container more (docker --shm-size, a larger /dev/shm volume), or "
            "lower staging_bytes",
        )
    if error.errno in _TOO_MANY:
        return (
            "pages.file_limit",
            f"no shared memory in {SHARED_MEMORY}: {error.strerror}: raise the limit of open files "
            "(ulimit -n)",
        )
    return (
        "pages.shm",
        f"no shared memory in {SHARED_MEMORY}: {error.strerror}: mount the host's /dev/shm there, "
        f"writable for user {os.geteuid()}",
    )


def _no_link(error: OSError, link: Path) -> tuple[str, str]:
    if error.errno in _NOT_ALLOWED:
        return (
            "pages.daemon_user",
            f"the 3FS daemon does not let user {os.geteuid()} register memory ({link.parent}: "
            f"{error.strerror}): run this as the user that the daemon runs as",
        )
    if error.errno in _TOO_MANY:
        return (
            "pages.iov_limit",
            "the 3FS daemon has no room for more rings and memory: raise its iov_limit",
        )
    if error.errno in _MOUNT_GONE:
        return (
            "pages.mount_gone",
            f"the 3FS daemon has ended ({link.parent}: {error.strerror}): start hf3fs_fuse_main "
            "and mount it again",
        )
    return (
        "pages.shm_not_shared",
        f"the 3FS daemon cannot map staging ({link.parent}: {error.strerror}): share the host's "
        "/dev/shm with it (Kubernetes: a hostPath volume; docker: -v /dev/shm:/dev/shm or "
        "--ipc=host)",
    )
