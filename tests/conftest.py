"""What part of the tests this environment can run, said once at the end of the report."""

import importlib.util
from pathlib import Path

import pytest

from tests.emulation import library

NEEDS_ENGINE = [Path(__file__).parent / name for name in ("e2e", "vllm_plugin")]


@pytest.fixture(scope="session")
def hf3fs_library(tmp_path_factory):
    """The emulated library of 3FS."""
    return library.build(tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def emulation(hf3fs_library, tmp_path):
    """The same with a mount of its own and without faults."""
    emulation = library.Emulation(hf3fs_library, tmp_path / "mnt")
    yield emulation
    emulation.configure()


def _has_engine() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _has_native() -> bool:
    return importlib.util.find_spec("kvferry._native") is not None


def pytest_addoption(parser):
    parser.addoption(
        "--restarts", type=int, default=4, help="of servers under load: tests/e2e/test_rolling_*"
    )


def pytest_ignore_collect(collection_path):
    """Tests with a real engine are not even imported where there is none."""
    if collection_path in NEEDS_ENGINE and not _has_engine():
        return True
    return None


def pytest_terminal_summary(terminalreporter):
    if not _has_native():
        terminalreporter.write_line("no native extension here: its tests were skipped")
    if not _has_engine():
        terminalreporter.write_line("no vLLM here: tests/e2e and tests/vllm_plugin were left out")
