"""Runs tests on a native extension built with a sanitizer: sanitized.py address|thread [tests...].

It is built into a temporary folder; what is installed stays as it is. Tests that start other Python
programs are run with the plain extension there.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFAULT_TESTS = [
    "tests/pages/test_usrbio.py",
    "tests/pages/test_faults.py",
    "tests/pages/test_never_wrong.py",
    "tests/world/test_usrbio_world.py",
    "tests/native",
]
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    "TSAN_OPTIONS": "exitcode=66",
}
RUN = """
import sys
sys.meta_path = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import pytest, kvferry._native
assert kvferry._native.__file__.startswith(sys.argv[1]), kvferry._native.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--capture=sys", *sys.argv[3:]]))
"""


def main() -> None:
    sanitizer, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"-fsanitize={sanitizer} -g -fno-omit-frame-pointer"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        build = ["-C", f"build-dir={folder}/build"]  # not the one that is there, built without
        subprocess.run(
            [*install, "--no-build-isolation", "--target", folder, *build, str(ROOT)],
            env={**os.environ, "CXXFLAGS": flags},
            check=True,
        )
        runtime = subprocess.run(
            ["gcc", f"-print-file-name=lib{sanitizer[0]}san.so"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        done = subprocess.run(
            [sys.executable, "-c", RUN, folder, str(ROOT), *(tests or DEFAULT_TESTS)],
            cwd=ROOT,
            env={**os.environ, **OPTIONS, "LD_PRELOAD": f"{runtime} libstdc++.so.6"},
            check=False,
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
