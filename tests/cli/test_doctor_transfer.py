"""An operator must learn from `doctor --transfer` what keeps engines from handing over, and never
see the secret there."""

import importlib.util
import json
import socket

import pytest
from typer.testing import CliRunner

from kvferry._nixl import PACKAGES
from kvferry.cli import engine_checks, nixl_probe, transfer_checks
from kvferry.cli.finding import State
from kvferry.cli.main import app
from kvferry.clock import SystemClock
from kvferry.config import SECRET_VARIABLE
from kvferry.transfer.memory import Fabric, MemoryLink, Motion, Prompt

SECRET = "open sesame, sixteen and more"
PLUGINS = {"UCX": ["DRAM", "VRAM"], "GDS": []}
LOG = """
[1.2] [vm:7:0] ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/libucp.so)
[1.3] [vm:7:0] ucp_worker.c:1997 UCX  INFO    one self cfg#0 rma_am(tcp/lo)  ka(tcp/lo)
[1.4] [vm:7:0] ucp_worker.c:1997 UCX  INFO    one intra-node cfg#1 rma(rc_mlx5/mlx5_0:1)  ka(ud/a)
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


def by_check(findings):
    return {finding.check: finding for finding in findings}


def settings(role="kv_producer", **options):
    return by_check(transfer_checks.check_settings(options, role))


def told(**facts):
    return json.dumps({"plugins": PLUGINS, "moved_bytes": 1 << 26, "bytes_per_s": 2e9, **facts})


def test_what_is_right_passes():
    found = settings()
    assert {finding.state for finding in found.values()} == {State.PASSED}
    assert list(found) == ["secret", "settings", "listen address"]


@pytest.mark.parametrize("text", ["", "too short"])
def test_a_secret_that_is_none_is_named_with_the_cure(monkeypatch, text):
    monkeypatch.setenv(SECRET_VARIABLE, text)
    found = settings()["secret"]
    assert found.state is State.FAILED
    assert SECRET_VARIABLE in found.cure


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path):
    found = settings(secret_file=str(tmp_path / "none"))["secret"]
    assert found.state is State.FAILED
    assert str(tmp_path / "none") in found.detail


@pytest.mark.parametrize("text", [SECRET, SECRET[:10]])
def test_the_secret_is_never_printed(monkeypatch, tmp_path, text):
    monkeypatch.setenv(SECRET_VARIABLE, text)
    (tmp_path / "secret").write_text(text)
    for options in ({}, {"secret_file": str(tmp_path / "secret")}, {"bind_host": "0.0.0.0"}):
        found = transfer_checks.check_settings(options, "kv_both")
        assert text not in " ".join(finding.detail + finding.cure for finding in found)


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"bind_hots": "::1"}, "settings"),
        ({"lease_s": 700.0}, "settings"),
        ({"bind_host": "0.0.0.0"}, "listen address"),
        ({"advertise_host": "0.0.0.0"}, "listen address"),
        ({"advertise_host": "no.such.name.invalid"}, "listen address"),
        ({"bind_host": "203.0.113.7", "advertise_host": "203.0.113.7"}, "listen address"),
    ],
)
def test_each_wrong_setting_is_named(options, check):
    found = settings(**options)[check]
    assert found.state is State.FAILED
    assert found.cure


def test_a_port_that_is_taken_is_a_producers_trouble_only():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert settings(bind_port=port)["listen address"].state is State.FAILED
        assert "listen address" not in settings("kv_consumer", bind_port=port)


def test_the_json_given_to_vllm_is_judged_by_its_connector():
    transfer = {
        "kv_connector": "FerryTransferConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"lease_s": 5.0},
    }
    found = by_check(engine_checks.check_transfer_config(transfer))
    assert {finding.state for finding in found.values()} == {State.PASSED}
    assert "kv_load_failure_policy" not in found

    found = by_check(engine_checks.check_transfer_config({**transfer, "kv_role": "kv_consumer"}))
    assert found["kv_load_failure_policy"].state is State.FAILED
    found = by_check(engine_checks.check_transfer_config({**transfer, "kv_role": "producer"}))
    assert found["kv_role"].state is State.FAILED


def test_the_nearest_name_is_the_cure():
    wrong = {"kv_connector": "FerryTransferConector"}
    (found,) = engine_checks.check_transfer_config(wrong)
    assert "FerryTransferConnector" in found.cure


@pytest.mark.parametrize("versions", [{}, {"nixl-cu12": "1.3.2"}])
def test_nixl_that_is_not_there_or_too_old_is_not_asked(monkeypatch, versions):
    monkeypatch.setattr(transfer_checks, "probe", lambda: pytest.fail("asked"))
    (found,) = transfer_checks.check_nixl(versions)
    assert found.state is State.FAILED
    assert found.cure


def test_what_the_probe_says_is_told():
    found = by_check(transfer_checks.judge(0, told(), LOG))
    assert {finding.state for finding in found.values()} == {State.PASSED}
    assert found["NIXL plugins"].detail == "UCX for DRAM, VRAM; without their libraries: GDS"
    assert found["transports"].detail == "UCX 1.23.0: rc_mlx5/mlx5_0:1, ud/a"
    assert found["self-test"].detail.startswith("64.0 MiB verified, 1.9 GiB/s")


@pytest.mark.parametrize(
    ("facts", "check"),
    [
        ({"plugins": {"UCX": [], "POSIX": ["DRAM"]}}, "NIXL plugins"),
        ({"problem": "what was read is not what was there"}, "self-test"),
    ],
)
def test_what_the_probe_finds_wrong_fails(facts, check):
    found = by_check(transfer_checks.judge(0, told(**facts), LOG))
    assert found[check].state is State.FAILED


def test_nixl_that_crashes_at_work_fails_with_its_last_words():
    (found,) = transfer_checks.judge(-11, "", "first\nlast words\n")
    assert (found.state, found.detail) == (State.FAILED, "last words")


def test_nixl_that_crashes_after_work_is_a_warning():
    found = by_check(transfer_checks.judge(-11, told(), LOG))
    assert found["NIXL's end"].state is State.WARNING
    assert found["self-test"].state is State.PASSED


def test_ucx_that_says_nothing_is_a_warning():
    assert by_check(transfer_checks.judge(0, told(), ""))["transports"].state is State.WARNING


class Losing(Prompt):
    def moves(self, poster, peer):
        return Motion.LOSE


class LyingLink(MemoryLink):
    """Says that reads are done, and brings one piece of each."""

    def post(self, peer, target, target_indices, source, source_indices):
        return super().post(peer, target, target_indices[:1], source, source_indices[:1])


def measured(fabric, reader=MemoryLink):
    clock = SystemClock()
    ends = nixl_probe.Ends(reader(fabric, clock), MemoryLink(fabric, clock), clock)
    return ends.measure(PLUGINS)


def test_bytes_that_arrive_are_measured():
    probed = measured(Fabric())
    assert not probed.problem
    assert probed.moved_bytes == nixl_probe.PIECE_BYTES * nixl_probe.PIECE_COUNT
    assert probed.bytes_per_s > 0


def test_reads_that_fail_are_told():
    assert "a read failed" in measured(Fabric(Losing())).problem


def test_bytes_that_are_not_what_was_there_are_told():
    assert "is not what was there" in measured(Fabric(), LyingLink).problem


@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, PACKAGES)), reason="NIXL is not installed"
)
def test_on_this_machine(monkeypatch):
    monkeypatch.setenv("UCX_MODULES", "^ib")
    done = CliRunner().invoke(app, ["doctor", "--transfer", "--json"])
    assert done.exit_code == 0, done.stdout
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["NIXL"]["state"] == "passed"
    assert found["self-test"]["state"] == "passed"
    assert found["transports"]["state"] == "passed"
    assert SECRET not in done.stdout
