"""An operator of 3FS must learn from `doctor` which of the things that USRBIO needs is missing."""

import json

import pytest
from typer.testing import CliRunner

from kvferry.cli import store_checks
from kvferry.cli.finding import State
from kvferry.cli.main import app
from kvferry.config import decode

pytest.importorskip("kvferry._native")


def _found(emulation, **settings):
    named = {"pages": f"usrbio://{emulation.mount}/kv", "capacity_bytes": "1GiB"}
    config = decode({"usrbio_library": str(emulation.path), **named, **settings})
    return {finding.check: finding for finding in store_checks.check_store(config)}


def test_where_all_is_there_all_passes_and_nothing_is_left(emulation):
    found = _found(emulation, alignment_bytes="1MiB")
    not_passed = {name: f for name, f in found.items() if f.state is not State.PASSED}
    assert not_passed == {}
    assert {"open files", "3FS library", "3FS mount", "3FS daemon", "holes"} <= found.keys()
    assert "GB/s" in found["write"].detail
    assert "GB/s" in found["read, verified"].detail
    assert emulation.left_over() == []
    assert [path.name for path in emulation.mount.iterdir()] == ["3fs-virt"]


@pytest.mark.parametrize(
    ("settings", "check", "cure"),
    [
        ({"usrbio_library": "/nowhere.so"}, "3FS library", "install libhf3fs_api_shared.so"),
        ({"pages": "usrbio:///proc/kv"}, "3FS mount", "mount it there"),
        ({"staging_bytes": 1 << 44}, "shared memory", "--shm-size"),
    ],
)
def test_what_is_missing_fails_with_its_cure(emulation, settings, check, cure):
    found = _found(emulation, **settings)
    assert found[check].state is State.FAILED
    assert cure in found[check].cure


@pytest.mark.parametrize(
    ("faults", "check", "words"),
    [
        ({"daemon_uid": 4711}, "3FS daemon", "must run as user"),
        ({"enospc": 1}, "write", "No space left"),
    ],
)
def test_a_daemon_that_refuses_fails_with_its_reason(emulation, faults, check, words):
    emulation.configure(**faults)
    finding = _found(emulation, alignment_bytes="1MiB")[check]
    assert finding.state is State.FAILED
    assert words in finding.detail + finding.cure
    emulation.configure()
    assert emulation.left_over() == []


def test_small_slots_are_a_warning(emulation):
    finding = _found(emulation)["chunks"]
    assert finding.state is State.WARNING
    assert "alignment_bytes" in finding.cure


def test_the_command_line(emulation):
    command = ["doctor", f"usrbio://{emulation.mount}/kv", "--json"]
    done = CliRunner().invoke(app, [*command, "--usrbio-library", str(emulation.path)])
    checks = {line["check"]: line["state"] for line in json.loads(done.stdout)}
    assert checks["3FS daemon"] == "passed"
