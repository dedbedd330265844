"""One Valkey server for the tests of a session that need one."""

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
