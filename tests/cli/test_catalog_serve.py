"""A server that anybody could reach, or whose password others could read, would give a store away;
one that outlives its command would keep its port."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

from kvferry.catalog.valkey import ValkeyCatalog
from kvferry.catalog.valkey_server import free_port
from kvferry.clock import SystemClock
from kvferry.config import child_environment
from kvferry.errors import ConfigError
from kvferry.server_url import parse

STORE = b"s" * 16


@pytest.fixture
def command():
    started = []

    def start(*arguments, **environment) -> subprocess.Popen:
        program = [sys.executable, "-c", "from kvferry.cli.main import main; main()"]
        process = subprocess.Popen(
            [*program, "catalog", "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(**environment),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()  # a server of its own goes with it
        process.communicate(timeout=30)


def announced(process: subprocess.Popen) -> dict:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            return json.loads("".join(lines))
    raise AssertionError(process.stderr.read())


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_stopped_and_keeps_what_it_was_told(command, tmp_path, number):
    folder, port = tmp_path / "server", free_port()
    for is_first in (True, False):
        process = command(folder, "--port", port, "--json")
        said = announced(process)
        assert said["url"] == f"valkey://127.0.0.1:{port}/0"
        password = (folder / "password").read_text().strip()
        catalog = ValkeyCatalog(parse(f"valkey://:{password}@127.0.0.1:{port}"), SystemClock())
        assert catalog.open(STORE, 1 << 24, 1 << 20) is is_first
        catalog.close()
        process.send_signal(number)
        assert process.wait(30) == 0, process.stderr.read()
        assert not is_alive(said["process_id"])


def test_nobody_else_reads_the_password(command, tmp_path):
    folder, port = tmp_path / "server", free_port()
    process = command(folder, "--port", port, "--json")
    announced(process)
    password = (folder / "password").read_text().strip()
    assert len(password) >= 32
    assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    stranger = ValkeyCatalog(parse(f"valkey://127.0.0.1:{port}"), SystemClock())
    with pytest.raises(ConfigError, match="refuses"):
        stranger.open(STORE, 1 << 24, 1 << 20)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    texts = [path.read_text() for path in folder.glob("valkey.*")]
    assert texts
    assert not any(password in text for text in (output, errors, *texts))
    (folder / "password").chmod(0o644)
    process = command(folder, "--port", port)
    assert process.wait(30) == 2
    assert "chmod 600" in process.stderr.read()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "somewhere"])
def test_without_a_password_only_this_host_is_served(command, tmp_path, host):
    process = command(tmp_path, "--host", host, "--no-password")
    assert process.wait(30) == 2
    assert "needs a password" in process.stderr.read()


def test_a_port_that_is_taken_is_said(command, tmp_path):
    port = free_port()
    first = command(tmp_path / "a", "--port", port, "--json", KVFERRY_CATALOG_PASSWORD="one")
    assert announced(first)["password_file"] is None
    second = command(tmp_path / "b", "--port", port, KVFERRY_CATALOG_PASSWORD="two")
    assert second.wait(60) == 2
    assert "ddress already in use" in second.stderr.read()
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
