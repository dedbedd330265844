"""An operator of 3FS must learn from `doctor` which of the things that USRBIO needs is missing."""

import json

import pytest
from typer.testing import CliRunner

from kvferry.cli import store_checks
from kvferry.cli.finding import State
from kvferry.cli.main import app
from kvferry.config import decode

pytest.importorskip("kvferry._native")
from kvferry.layout import Address
from kvferry.pages.base import Outcome
from kvferry.testing.pages import GEOMETRY, HOME, NAMESPACE
from kvferry.testing.staging import Driver, page_id
from tests.pages.usrbio_place import UsrbioPlace


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


@pytest.mark.parametrize("option", [[], ["--pages"]])
def test_the_command_line(emulation, option):
    command = ["doctor", *option, f"usrbio://{emulation.mount}/kv", "--json"]
    done = CliRunner().invoke(app, [*command, "--usrbio-library", str(emulation.path)])
    checks = {line["check"]: line["state"] for line in json.loads(done.stdout)}
    assert checks["3FS daemon"] == "passed"


def _filled(emulation) -> UsrbioPlace:
    place = UsrbioPlace(emulation)
    store = place.store()
    store.open()
    store.create_segment(HOME.segment, NAMESPACE, GEOMETRY)
    driver = Driver(store, GEOMETRY)
    for name, slot in (("a", 3), ("b", 4)):
        address = Address(HOME.segment, slot)
        assert driver.write(page_id(name), address).outcome is Outcome.OK
    store.close()
    return place


def test_status_and_check_through_rings(emulation):
    """An operator of 3FS looks at a store by the name that its engines use."""
    place = _filled(emulation)
    named = [f"usrbio://{place.root}", "--json", "--usrbio-library", str(emulation.path)]
    shown = CliRunner().invoke(app, ["status", *named])
    assert json.loads(shown.stdout)["alignment_bytes"] == 4096
    reads = emulation.count("reads")
    checked = CliRunner().invoke(app, ["check", *named])
    assert (checked.exit_code, json.loads(checked.stdout)["checked_count"]) == (0, 2)
    assert emulation.count("reads") >= reads + 2
    page = bytearray(place.page(HOME))
    page[5000] ^= 1
    place.replace_page(HOME, bytes(page))
    checked = CliRunner().invoke(app, ["check", *named])
    assert (checked.exit_code, len(json.loads(checked.stdout)["bad"])) == (1, 1)
    assert emulation.left_over() == []


def test_without_the_library_they_say_what_to_name(emulation):
    place = _filled(emulation)
    for command in ("status", "check"):
        done = CliRunner().invoke(
            app, [command, f"usrbio://{place.root}", "--usrbio-library", "/nowhere.so"]
        )
        assert "usrbio_library" in str(done.exception)
