"""An operator's mistake must stop the engine with words that say how to mend it."""

import dataclasses
import re
from pathlib import Path

import pytest

from kvferry import config
from kvferry.errors import ConfigError
from kvferry.setting_values import parse_size


def refused(**options):
    """The message with which these options are refused."""
    with pytest.raises(ConfigError) as caught:
        config.decode({"pages": "memory:", **options})
    assert caught.value.context["key"] in caught.value.message
    return caught.value.message


def test_the_readme_line_is_enough():
    decoded = config.decode({"pages": "posix:///var/kv", "capacity_bytes": "200GiB"})
    assert decoded.capacity_bytes == 200 << 30
    assert decoded.chunk_tokens is None
    assert decoded.load_deadline_s == 10.0


def test_an_unknown_key_is_named_with_the_nearest_valid_one():
    message = refused(chunk_token=64)
    assert "'chunk_token'" in message
    assert "64" in message
    assert "'chunk_tokens'" in message


def test_an_unknown_key_far_from_all_others_lists_them():
    assert "reserve_ahead_count" in refused(zzz=1)


def test_missing_pages_says_what_to_write():
    with pytest.raises(ConfigError, match="posix:///"):
        config.decode({"capacity_bytes": 1 << 30})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("chunk_tokens", "64", "int"),
        ("chunk_tokens", True, "int"),
        ("chunk_tokens", 0, ">= 1"),
        ("cost_model", 1, "bool"),
        ("grace_s", -1, ">= 0"),
        ("load_deadline_s", 0, "> 0"),
        ("load_deadline_s", float("nan"), "> 0"),
        ("load_deadline_s", float("inf"), "<= 86400"),
        ("read_threads", 1000, "<= 64"),
        ("capacity_bytes", "lots", "200GiB"),
        ("capacity_bytes", 0, ">= 4096"),
        ("alignment_bytes", 5000, "power of two"),
        ("staging_bytes", 4096, ">= 1048576"),
        ("direct_io", "yes", '"auto" or "on" or "off"'),
        ("model_id", "", "length >= 1"),
        ("pages", 7, "str"),
        ("pages", "posix://var/kv", "posix:///var/kv"),
        ("pages", "posix:///", "posix:///path"),
        ("pages", "memory:///x", "memory:"),
        ("catalog", "lmdb:state", "lmdb:///state"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(name, value, expected):
    message = refused(**{name: value})
    assert message.startswith(f"{name}: expected ")
    assert repr(value) in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("direct_io", "atuo", "auto"),
        ("capacity_bytes", "200GB", "GiB"),
        ("pages", "posx:///var/kv", "posix"),
        ("catalog", "ldmb:///var/kv", "lmdb"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_one(name, value, near):
    assert refused(**{name: value}).endswith(f"Did you mean '{near}'?")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"segment_bytes": 3 * 4096, "alignment_bytes": 8192}, "multiple of 8192"),
        ({"segment_bytes": 4096}, "at least two"),
        ({"segment_bytes": "2MiB", "capacity_bytes": "1MiB"}, "at least one segment"),
        ({"reservation_lease_s": 45, "store_deadline_s": 30}, "twice store_deadline_s"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(options, words):
    assert words in refused(**options)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2TiB", 2 << 40), (" 3MiB ", 3 << 20)],
)
def test_sizes_are_powers_of_1024(text, size_bytes):
    assert parse_size("capacity_bytes", text) == size_bytes


def test_the_default_catalog_is_local_and_one_per_store(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    decoded = config.decode({"pages": "posix:///var/kv"})
    assert decoded.catalog_url(b"\xab" * 16) == f"lmdb://{tmp_path}/kvferry/{'ab' * 16}"


def test_a_relative_state_folder_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert config.state_folder() == Path.home() / ".local/state/kvferry"


def test_a_named_catalog_wins_and_memory_pages_have_a_memory_catalog():
    named = config.decode({"pages": "memory:", "catalog": "lmdb:///srv/catalog"})
    assert named.catalog_url(bytes(16)) == "lmdb:///srv/catalog"
    assert config.decode({"pages": "memory:"}).catalog_url(bytes(16)) == "memory:"


def test_the_tree_is_frozen():
    decoded = config.decode({"pages": "memory:"})
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        decoded.pages = "posix:///elsewhere"


def test_every_field_is_documented_with_its_scope():
    for field in config.field_facts():
        assert field.scope in ("cluster", "process")
        assert re.search(r"[a-z].*\.$", field.description), field.name
