"""Valkey servers: one that tests share, and one for each test that does something to it."""

import pytest

from kvferry.testing.valkey import ServerProcess


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory):
    server = ServerProcess(tmp_path_factory.mktemp("valkey"), "appendonly no")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def empty_server(valkey_server):
    """The same server, with nothing in it."""
    valkey_server.say("FLUSHALL")
    return valkey_server


@pytest.fixture
def server(tmp_path):
    """What it said is on disk: else reservations that it forgets have two owners."""
    server = ServerProcess(tmp_path / "server", "appendfsync always")
    server.start()
    yield server
    server.kill()
