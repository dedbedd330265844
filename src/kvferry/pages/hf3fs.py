"""The library of 3FS and the mount that a path is on: found, or an error that names the cure."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvferry._native import Hf3fs
from kvferry.errors import ConfigError

LIBRARY = "libhf3fs_api_shared.so"
PLACES = (LIBRARY, f"/usr/lib/{LIBRARY}", f"/usr/local/lib/{LIBRARY}", f"/opt/3fs/lib/{LIBRARY}")
HARD_FILES_MAX = 1 << 24
"""The library makes a table of as many entries as the hard limit of open files has."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted 3FS, and the library that moves bytes there."""

    library: Hf3fs
    point: str


def find_mount(folder: Path, library: str | None, file_count: int) -> Mount:
    """The mount that `folder` is on or would be made on. `library`: its path; None: the usual
    places. `file_count`: how many files will be open. Raises ConfigError."""
    check_file_limits(*resource.getrlimit(resource.RLIMIT_NOFILE), file_count)
    loaded = load_library(library)
    existing = nearest_folder(folder)
    point = loaded.mount_point(str(existing))
    if point is None:
        raise ConfigError(
            "pages.not_3fs",
            f"{folder} is not on a mounted 3FS: mount it there (hf3fs_fuse_main, file system type "
            f"fuse.hf3fs), name a folder on it, or use posix://{folder}",
            path=str(folder),
        )
    return Mount(loaded, point)


def check_file_limits(soft: int, hard: int, file_count: int) -> None:
    """Raises ConfigError for limits with which the library fails."""
    if hard == resource.RLIM_INFINITY or hard > HARD_FILES_MAX:
        raise ConfigError(
            "pages.files_unlimited",
            f"the hard limit of open files is {'unlimited' if hard < 0 else hard}, for which the "
            "library of 3FS makes a table when loaded: set it to 1048576 (ulimit -Hn 1048576, "
            "docker --ulimit nofile=65536:1048576, systemd LimitNOFILE)",
        )
    if soft != resource.RLIM_INFINITY and soft < file_count:
        raise ConfigError(
            "pages.file_limit",
            f"the limit of open files is {soft}, and {file_count} are needed, since 3FS keeps a "
            f"second descriptor of each: raise it (ulimit -n {max(65536, file_count)})",
        )


def load_library(path: str | None) -> Hf3fs:
    """Raises ConfigError with what the loader says of each place."""
    reasons = []
    for place in [path] if path else PLACES:
        try:
            return Hf3fs.load(place)
        except RuntimeError as error:
            reasons.append(str(error))
    raise ConfigError(
        "pages.no_library",
        f"no usable library of 3FS ({'; '.join(reasons)}): install {LIBRARY} of the version that "
        "the daemon has, with the libraries that it needs, or name its path in usrbio_library",
    )


def nearest_folder(folder: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def keep_from_children(mount_point: str) -> None:
    """Lets no program that is started later inherit the library's hold on the mount's `iovs`: the
    daemon would take its memory for that of a process that lives."""
    wanted = f"{mount_point}/3fs-virt/iovs"
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == wanted:
                os.set_inheritable(int(name), False)
        except OSError:
            continue
