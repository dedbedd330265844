"""What is between engines and the catalog's server: TLS, and an address that leads to another
server after a failover."""

import ssl
import time
from dataclasses import replace

import pytest
import trustme

from kvferry import server_url
from kvferry.catalog.base import LOST, Space
from kvferry.catalog.open import open_url
from kvferry.catalog.snapshot import check_invariants
from kvferry.catalog.valkey import ValkeyCatalog
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, UnavailableError
from kvferry.testing.valkey import ServerProcess

from .relay import Relay
from .test_valkey_server import CAPACITY_BYTES, SEGMENT_BYTES, SPACE, STORE, present, store

CLOCK = SystemClock()
PATIENCE_S = 30.0
NOWHERE = ("127.0.0.1", 1)


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def secured(server, authority):
    """Ends TLS for the server, as `localhost`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    relay = Relay(("127.0.0.1", server.url.port), context)
    relay.start()
    yield relay
    relay.stop()


@pytest.fixture
def authority_file(authority, tmp_path):
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def opened(url: str) -> ValkeyCatalog:
    catalog = open_url(url, CLOCK)
    catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    return catalog


def test_records_go_through_tls(server, secured, authority_file):
    server.say("CONFIG", "SET", "requirepass", "secret")
    url = f"valkeys://:secret@localhost:{secured.port}?ca_file={authority_file}"
    catalog = opened(url)
    catalog.attach(SPACE)
    assert catalog.grown(catalog.grow(SPACE.namespace))
    store(catalog, b"x")
    assert present(catalog, b"x", b"y") == [True, False]
    catalog.close()


@pytest.mark.parametrize(
    "url",
    [
        "valkeys://localhost:{port}",  # nobody knows its authority
        "valkeys://127.0.0.1:{port}?ca_file={authority}",  # it has no certificate of that name
    ],
)
def test_a_server_that_cannot_be_trusted_is_a_mistake(secured, authority_file, url):
    with pytest.raises(ConfigError, match="cannot be trusted") as caught:
        opened(url.format(port=secured.port, authority=authority_file))
    assert caught.value.kind == "catalog.untrusted"


def test_a_server_without_tls_and_a_client_without_it_get_nowhere(server, secured):
    for url in (f"valkeys://localhost:{server.url.port}", f"valkey://localhost:{secured.port}"):
        started_s = time.monotonic()
        with pytest.raises(UnavailableError) as caught:
            opened(url)
        assert caught.value.kind == "catalog.server"
        assert time.monotonic() - started_s < PATIENCE_S, "no deadline"


def test_a_file_of_authorities_that_is_none_is_a_mistake(secured, tmp_path):
    for path in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("nothing\n")
        with pytest.raises(ConfigError, match="ca_file"):
            opened(f"valkeys://localhost:{secured.port}?ca_file={path}")


@pytest.fixture
def address(server):
    """Of the server, for engines."""
    relay = Relay(("127.0.0.1", server.url.port))
    relay.start()
    yield relay
    relay.stop()


@pytest.fixture
def following(server):
    """Of the server, for its replica."""
    relay = Relay(("127.0.0.1", server.url.port))
    relay.start()
    yield relay
    relay.stop()


@pytest.fixture
def replica(following, tmp_path):
    replica = ServerProcess(tmp_path / "replica")
    replica.start()
    replica.say("REPLICAOF", "127.0.0.1", following.port)
    yield replica
    replica.kill()


def caught_up(server) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while server.say("WAIT", 1, 1000) < 1:
        assert time.monotonic() < give_up_s, "the replica does not follow"


def test_a_failover_to_a_replica_that_lost_the_last_writes(server, replica, following, address):
    """What it has lost is hits: no slot gets a second owner that a record does not say."""
    catalog = opened(f"valkey://127.0.0.1:{address.port}")
    catalog.attach(SPACE)
    assert catalog.grown(catalog.grow(SPACE.namespace))
    store(catalog, b"x")
    caught_up(server)
    following.lead_to(NOWHERE)
    store(catalog, b"y")
    newest = catalog.lookup(SPACE.namespace, [b"y" * 32])[0]
    server.kill()
    replica.say("REPLICAOF", "NO", "ONE")
    address.lead_to(("127.0.0.1", replica.url.port))

    with pytest.raises(UnavailableError) as caught:
        present(catalog, b"x")
    assert caught.value.kind == LOST
    assert not catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES), "the replica had it"
    assert present(catalog, b"x", b"y") == [True, False]
    (again,) = catalog.reserve(SPACE.namespace, 1, 60.0)
    assert again.address == newest.address, "the slot was not lost: nothing was shown"
    assert again.generation != newest.generation, "its bytes would prove themselves"
    assert check_invariants(catalog.snapshot()) == []
    catalog.close()


def test_an_address_that_leads_nowhere_for_a_while(server, address):
    catalog = opened(f"valkey://127.0.0.1:{address.port}")
    catalog.attach(Space(b"n" * 32, 8, 4096, slice_count=1, chunk_tokens=16, description=""))
    address.lead_to(NOWHERE)
    with pytest.raises(UnavailableError):
        catalog.stats()
    address.lead_to(("127.0.0.1", server.url.port))
    assert catalog.stats().capacity_bytes == CAPACITY_BYTES
    catalog.close()


def test_a_url_keeps_its_authority():
    url = server_url.parse("valkeys://localhost:6380/0?ca_file=/etc/ferry/ca.pem")
    assert (url.is_tls, url.ca_file) == (True, "/etc/ferry/ca.pem")
    assert replace(url, password="secret").name == "valkeys://localhost:6380/0"
