"""Checks of the machine and of what is installed: nothing here needs a store."""

import importlib
import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

from kvferry import config
from kvferry.cli.finding import Finding, failed, passed, warning

PYTHON_MIN = (3, 11)
VLLM_MIN = (0, 26)
VLLM_MAX = (0, 33)
VLLM_MANY_GROUPS_MIN = (0, 30)
ENTRY_POINT_GROUP = "vllm.general_plugins"
SHARED_MEMORY_MIN_BYTES = 1 << 30


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= PYTHON_MIN:
        return passed("Python", version)
    return failed("Python", version, f"use Python {_text(PYTHON_MIN)} or newer")


def check_vllm(versions: dict[str, str]) -> Finding:
    """`versions`: installed distributions that bring a package `vllm`, with their versions."""
    supported = f"{_text(VLLM_MIN)} to {_text(VLLM_MAX)}"
    if not versions:
        return warning("vLLM", "not installed here", f"install vLLM {supported} where engines run")
    name, text = next(iter(versions.items()))
    found = _release(text)
    if found is None:
        return warning(
            "vLLM", f"{name} {text}", f"a build without a release number; use {supported}"
        )
    if not VLLM_MIN <= found <= VLLM_MAX:
        return failed("vLLM", f"{name} {text}", f"install vLLM {supported}")
    if found < VLLM_MANY_GROUPS_MIN:
        cure = f"models with more than one cache group need {_text(VLLM_MANY_GROUPS_MIN)}"
        return warning("vLLM", f"{name} {text}", cure)
    return passed("vLLM", f"{name} {text}")


def installed_vllm() -> dict[str, str]:
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return {name: importlib.metadata.version(name) for name in names}


def check_plugin() -> Finding:
    """vLLM finds kvferry by an entry point, which exists only where kvferry is installed."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name="kvferry")
    if not found:
        return failed("plugin", "not registered", "pip install kvferry into the engine's Python")
    enabled = config.enabled_plugins()
    if enabled is not None and "kvferry" not in enabled:
        cure = "add kvferry to VLLM_PLUGINS, or unset it"
        return failed("plugin", f"VLLM_PLUGINS is {','.join(enabled)!r}", cure)
    return passed("plugin", "registered")


def check_native() -> Finding:
    try:
        module = importlib.import_module("kvferry._native")
    except ImportError as error:
        cure = "install gcc and g++, then pip install kvferry again"
        return failed("native extension", str(error), cure)
    return passed("native extension", Path(module.__file__).name)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """vLLM's processes talk through it; containers often have 64 MiB of it."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return failed(str(folder), error.strerror, "mount a tmpfs there")
    detail = f"{free_bytes >> 20} MiB free"
    if free_bytes < SHARED_MEMORY_MIN_BYTES:
        return warning(str(folder), detail, "start the container with --shm-size=8g or --ipc=host")
    return passed(str(folder), detail)


def _release(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    return found if found > (0, 1) else None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
