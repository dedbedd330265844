"""A mistyped URL must stop the engine with a cure, not start it on another backend."""

import importlib

import pytest

from kvferry.errors import ConfigError
from kvferry.pages.facts import Asked
from kvferry.pages.memory import MemoryPages
from kvferry.pages.open import open_url
from kvferry.testing.clock import ManualClock

ASKED = Asked(capacity_bytes=1 << 20)


def _open(url: str):
    return open_url(url, ManualClock(), ASKED)


def test_memory():
    store = _open("memory:")
    assert isinstance(store, MemoryPages)
    assert store.segments() == []


def test_posix(tmp_path):
    posix = pytest.importorskip("kvferry.pages.posix")
    store = _open(f"posix://{tmp_path}/new/folder")
    assert isinstance(store, posix.PosixPages)
    assert (tmp_path / "new/folder/superblock.json").exists()
    store.close()


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("posx:///var/kv", "posix:///absolute/path"),
        ("posix://var/kv", "posix:///absolute/path"),
        ("posix:///", "posix:///absolute/path"),
        ("/var/kv", "posix:///absolute/path or usrbio:///absolute/path or memory:"),
        ("usrbio:/mnt/3fs", "usrbio:///absolute/path"),
        ("usrbo:///mnt/3fs", "usrbio:///absolute/path"),
        ("memory:x", "memory:"),
        ("memroy:", "memory:"),
        ("", "posix:///absolute/path or usrbio:///absolute/path or memory:"),
    ],
)
def test_anything_else_is_refused_with_what_was_meant(url, cure):
    with pytest.raises(ConfigError, match=f"did you mean {cure}\\?"):
        _open(url)


def test_a_missing_native_extension_is_refused_not_replaced(monkeypatch, tmp_path):
    def without_native(name):
        raise ImportError("libstdc++.so.6: not found")

    monkeypatch.setattr(importlib, "import_module", without_native)
    with pytest.raises(ConfigError, match=r"libstdc.*install kvferry"):
        _open(f"posix://{tmp_path}")
