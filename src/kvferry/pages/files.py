"""Files that appear whole or not at all, and system errors by whose fault they are."""

import errno
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.clock import Clock
from kvferry.errors import ConfigError, Error, ExhaustedError, UnavailableError

TEMPORARY_AGE_S = 600.0
"""A temporary file that is older than this belongs to nobody who lives."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WRONG_PATH = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
_MOUNT_GONE = "what serves its mount has ended: start that, and mount it again"
_CURES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the host's limit of open files (fs.file-max)",
    errno.ENOTCONN: _MOUNT_GONE,
    errno.ESTALE: _MOUNT_GONE,
}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_DIRECT_IO = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def system_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns an OSError into the error of the one who can help: ExhaustedError for a full disk or
    quota, ConfigError for a path that this user can't use, UnavailableError for the rest."""
    try:
        yield
    except Error:
        raise
    except OSError as error:
        reason = f"cannot {doing} {path}: {error.strerror}"
        details = {"errno": error.errno, "path": str(path)}
        if error.errno in _FULL:
            raise ExhaustedError("pages.no_space", reason, **details) from error
        if error.errno in _WRONG_PATH:
            cure = f"give user {os.geteuid()} a folder that it can write, in the key pages"
            raise ConfigError("pages.path", f"{reason}: {cure}", **details) from error
        cure = _CURES.get(error.errno)
        raise UnavailableError(
            "pages.io", f"{reason}: {cure}" if cure else reason, **details
        ) from error


def temporary_beside(target: Path, clock: Clock) -> Path:
    """A name that nobody else uses, in the folder of `target`."""
    return target.with_name(f"{target.name}.{clock.random_bytes(8).hex()}.tmp")


def write_file(path: Path, content: bytes) -> None:
    """A new file that is on the medium when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, target: Path) -> bool:
    """Gives a finished file its name, or False if the name is taken; the temporary name is gone
    in both cases. Where a file system has no hard links, two that race may both win, the later
    one for good."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if target.exists():
            return False
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def create_file(target: Path, content: bytes, clock: Clock) -> bool:
    """A small file that appears with all its content, or False if the name is taken."""
    temporary = temporary_beside(target, clock)
    try:
        write_file(temporary, content)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return publish(temporary, target)


def replace_file(target: Path, content: bytes, clock: Clock) -> None:
    """Replaces a small file: readers see the old content or the new."""
    temporary = temporary_beside(target, clock)
    try:
        write_file(temporary, content)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def file_system_now_s(folder: Path, clock: Clock) -> float:
    """The time of the file system itself, which is what its ages are counted from."""
    probe = temporary_beside(folder / "now", clock)
    write_file(probe, b"")
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def old_files(folder: Path, suffix: str, clock: Clock) -> list[Path]:
    """Files of a folder with this suffix that nobody has written to for `TEMPORARY_AGE_S`."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name.endswith(suffix)]
    if not found:
        return []
    newest_s = file_system_now_s(folder, clock) - TEMPORARY_AGE_S
    return [Path(entry.path) for entry in found if _written_s(entry) < newest_s]


def _written_s(entry: os.DirEntry) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def accepts_direct_io(path: Path) -> bool:
    """Whether this file can be had past the page cache, by trying. Works on a full disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, 4096) as block:
                os.preadv(descriptor, [block], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            return False
        raise
    return True
