"""The emulated libhf3fs_api_shared.so: built with gcc, set up and counted from here."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.pages.shared_memory import PREFIX, SHARED_MEMORY

NOW = ("rings", "files")
FAULTS = ("eio", "enospc", "eremoteio", "eintr", "lost", "late", "dropped")
SOURCES = Path(__file__).parent
FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread"]


def build(folder: Path, *flags: str) -> Path:
    """The library, new in `folder`. Skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    target = folder / "libhf3fs_api_shared.so"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    subprocess.run(
        [compiler, *FLAGS, *flags, "-o", str(target), *sources],
        check=True,
    )
    return target


class Loaded:
    """The library as this process has it: its settings and counters."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.hf3fs_emulation_count.restype = ctypes.c_uint64

    def configure(self, **settings: float) -> None:
        """Settings of hf3fs.h; what is not named is off."""
        text = ",".join(f"{name}={value}" for name, value in settings.items())
        self._library.hf3fs_emulation_configure(text.encode())

    def count(self, name: str) -> int:
        """A counter of hf3fs.h, since the library was loaded."""
        return self._library.hf3fs_emulation_count(name.encode())


class Emulation(Loaded):
    """The library as this process has it, and a folder that it takes for a mount."""

    def __init__(self, path: Path, mount: Path):
        super().__init__(path)
        self.mount = mount
        (mount / "3fs-virt/iovs").mkdir(parents=True)
        self.configure()
        self._before = {name: super(Emulation, self).count(name) for name in NOW}
        self._files_before = set(_own_files())

    def count(self, name: str) -> int:
        """A counter of hf3fs.h, since the library was loaded; of what is there now, what came since
        this was made."""
        return super().count(name) - self._before.get(name, 0)

    def links(self) -> list[Path]:
        """Memory that the daemon has."""
        return list((self.mount / "3fs-virt/iovs").iterdir())

    def left_over(self) -> list[str]:
        """What this process still has: rings, registered files, memory, links."""
        counted = [f"{self.count(name)} {name}" for name in NOW if self.count(name)]
        memory = set(_own_files()) - self._files_before
        return counted + [path.name for path in [*memory, *self.links()]]


def _own_files() -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))
