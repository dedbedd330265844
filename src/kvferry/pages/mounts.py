"""Which file system a path is on, and what that means for pages and for a catalog."""

from pathlib import Path
from typing import NamedTuple

NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p",
    "fuse.hf3fs", "fuse.3fs", "fuse.juicefs", "fuse.cephfs", "fuse.glusterfs", "fuse.sshfs",
}  # fmt: skip
USERSPACE_3FS = {"fuse.hf3fs", "fuse.3fs"}
IN_MEMORY = {"tmpfs", "ramfs"}
IN_CONTAINER = {"overlay", "overlayfs"}


class Mount(NamedTuple):
    """A mounted file system. `kind` as the kernel names it, such as ext4 or nfs4."""

    point: Path
    kind: str


def parse_mounts(text: str) -> list[Mount]:
    """The content of /proc/self/mountinfo, in the order of mounting."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        if after:
            point = before.split()[4].encode().decode("unicode_escape")
            mounts.append(Mount(Path(point), after.split()[0]))
    return mounts


def mount_of(path: Path, mounts: list[Mount]) -> Mount:
    """The mount that `path` (absolute, resolved) is on: of the deepest ones, the last mounted."""
    above = [mount for mount in reversed(mounts) if path.is_relative_to(mount.point)]
    return max(above, key=lambda mount: len(mount.point.parts), default=Mount(Path("/"), "unknown"))


def is_on_3fs(path: Path) -> bool:
    """Whether an existing path is on a mounted 3FS."""
    return mount_of(path.resolve(), current_mounts()).kind in USERSPACE_3FS


def current_mounts() -> list[Mount]:
    try:
        return parse_mounts(Path("/proc/self/mountinfo").read_text())
    except OSError:
        return []
