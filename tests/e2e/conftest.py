"""Processes and models for tests with real engines: few, since importing vLLM takes 15 s."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import installed, models
from tests.e2e.engine import EngineProcess
from tests.e2e.store import Store


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Callable[[str], Path]:
    """Folder of a tiny model by its name in `models.MAKERS`. Skips the test if kvferry refuses it
    with this vLLM."""
    folder = tmp_path_factory.mktemp("models")

    def find(name: str) -> Path:
        if not models.is_served(name):
            pytest.skip(f"vLLM {installed.VLLM}: models with several cache groups are refused")
        return models.save(name, folder)

    return find


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def engine_a(log_folder) -> Iterator[EngineProcess]:
    """A process that opens engines one after another; each test closes what it opened."""
    with EngineProcess(log_folder / "a.log") as process:
        yield process


@pytest.fixture(scope="session")
def engine_b(log_folder) -> Iterator[EngineProcess]:
    """Another one, which knows nothing of the first but what lies in the store."""
    with EngineProcess(log_folder / "b.log") as process:
        yield process


@pytest.fixture
def store(tmp_path) -> Store:
    """An empty store with its catalog."""
    return Store(tmp_path)
