"""`kvferry bench usrbio` over the emulated library on tmpfs: bench_usrbio.py [options of it...].

Builds the library and the bare loop, and makes a mount of the emulation's in /dev/shm. One ring for
two cores, if not told otherwise: the other core is the daemon's, which copies as a network card
would. With more, the daemon and whoever computes checksums take the cores from each other.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.emulation import library  # noqa: E402 - its path has just been made known


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
        built = library.build(Path(folder))
        loop = Path(folder, "usrbio_loop")
        source = ROOT / "benchmarks/usrbio_loop.c"
        compile_loop = ["gcc", "-O2", "-Wall", "-Werror", "-pthread", "-o", loop, source]
        subprocess.run(compile_loop, check=True)
        mount = Path(folder, "mnt")
        (mount / "3fs-virt/iovs").mkdir(parents=True)
        arguments = [str(mount), "--usrbio-library", str(built), "--loop", str(loop)]
        arguments += ["--depth", str(max(1, len(os.sched_getaffinity(0)) // 2))]
        run = "from kvferry.cli.main import main; main()"
        command = [sys.executable, "-c", run, "bench", "usrbio", *arguments, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
