"""The emulated libhf3fs_api_shared.so: built with gcc, set up and counted from here."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent


def build(folder: Path, *flags: str) -> Path:
    """The library, new in `folder`. Skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    target = folder / "libhf3fs_api_shared.so"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    subprocess.run(
        [compiler, "-std=gnu11", "-O2", "-g", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread"]
        + [*flags, "-o", str(target), *sources],
        check=True,
    )
    return target


class Emulation:
    """The library as this process has it, and a folder that it takes for a mount."""

    def __init__(self, path: Path, mount: Path):
        self.path = path
        self.mount = mount
        self._library = ctypes.CDLL(str(path))
        self._library.hf3fs_emulation_count.restype = ctypes.c_uint64
        (mount / "3fs-virt/iovs").mkdir(parents=True)
        self.configure()

    def configure(self, **settings: float) -> None:
        """Settings of hf3fs.h; what is not named is off."""
        text = ",".join(f"{name}={value}" for name, value in settings.items())
        self._library.hf3fs_emulation_configure(text.encode())

    def count(self, name: str) -> int:
        """A counter of hf3fs.h, since the library was loaded."""
        return self._library.hf3fs_emulation_count(name.encode())

    def links(self) -> list[Path]:
        """Memory that the daemon has."""
        return list((self.mount / "3fs-virt/iovs").iterdir())
