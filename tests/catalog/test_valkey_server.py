"""The server of the catalog is killed, stopped, emptied, set back and locked while engines use it:
each call ends in time, and what is lost is hits."""

import shutil
import signal

import pytest

from kvferry.catalog.base import LOST, Commit, Refused, Space, Verdict, Want
from kvferry.catalog.open import open_url
from kvferry.catalog.snapshot import check_invariants
from kvferry.catalog.valkey import ValkeyCatalog
from kvferry.catalog.valkey_library import Library, library
from kvferry.catalog.valkey_link import Link
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, CorruptError, UnavailableError

STORE = b"s" * 16
SEGMENT_BYTES = 1 << 20
CAPACITY_BYTES = 4 * SEGMENT_BYTES
SPACE = Space(b"n" * 32, 8, 4096, slice_count=1, chunk_tokens=16, description="")
CLOCK = SystemClock()
CALL_S = 0.5


def make(server, call_s: float = CALL_S) -> ValkeyCatalog:
    link = Link(server.url, CLOCK, library(), call_s)
    return ValkeyCatalog(server.url, CLOCK, link=link)


@pytest.fixture
def catalog(server):
    catalog = make(server)
    assert catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    catalog.attach(SPACE)
    assert catalog.grown(catalog.grow(SPACE.namespace))
    yield catalog
    catalog.close()


def store(catalog, *names: bytes) -> None:
    slots = catalog.reserve(SPACE.namespace, len(names), 60.0)
    commits = [
        Commit(name * 32, bytes(32), 0, slot, 0, 1) for name, slot in zip(names, slots, strict=True)
    ]
    assert set(catalog.commit(SPACE.namespace, commits)) == {Verdict.PUBLISHED}


def present(catalog, *names: bytes) -> list[bool]:
    hits = catalog.lookup(SPACE.namespace, [name * 32 for name in names])
    return [hit is not None for hit in hits]


def test_a_stopped_server_costs_a_deadline_and_then_answers_again(server, catalog):
    store(catalog, b"x")
    server.send(signal.SIGSTOP)
    start_s = CLOCK.now_s()
    with pytest.raises(UnavailableError):
        catalog.lookup(SPACE.namespace, [b"x" * 32])
    with pytest.raises(UnavailableError):
        catalog.reserve(SPACE.namespace, 1, 60.0)
    assert CLOCK.now_s() - start_s < 10 * CALL_S, "a call has no deadline"
    server.send(signal.SIGCONT)
    assert present(catalog, b"x") == [True]
    assert check_invariants(catalog.snapshot()) == []


def test_a_killed_server_is_unavailable_and_then_lost(server, catalog):
    store(catalog, b"x")
    server.kill()
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"catalog\.server"):
            catalog.lookup(SPACE.namespace, [b"x" * 32])
    server.start()
    for verb in (lambda: present(catalog, b"x"), catalog.sweep, catalog.stats):
        with pytest.raises(UnavailableError) as caught:
            verb()
        assert caught.value.kind == LOST, "it may know less than before"
    assert not catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES), "the file had all of it"
    assert present(catalog, b"x") == [True]
    assert check_invariants(catalog.snapshot()) == []


def test_a_server_that_comes_back_empty_is_a_new_catalog(server, catalog):
    store(catalog, b"x")
    name = catalog.catalog_id
    server.kill()
    server.forget()
    server.start()
    with pytest.raises(UnavailableError) as caught:
        present(catalog, b"x")
    assert caught.value.kind == LOST
    assert catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert catalog.catalog_id != name
    assert present(catalog, b"x") == [False]
    with pytest.raises(UnavailableError, match="unknown_namespace"):
        catalog.reserve(SPACE.namespace, 1, 60.0)


def test_records_that_are_flushed_are_a_catalog_lost(server, catalog):
    """The server lives, and its connections: only the records say it."""
    name = catalog.catalog_id
    server.say("FLUSHALL")
    for verb in (lambda: present(catalog, b"x"), catalog.sweep, catalog.snapshot):
        with pytest.raises(UnavailableError) as caught:
            verb()
        assert caught.value.kind == LOST
    assert catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert catalog.catalog_id != name


def test_an_old_file_is_an_old_catalog_whose_time_goes_on(server, catalog, tmp_path):
    store(catalog, b"x")
    server.kill()
    shutil.copytree(server.folder, tmp_path / "old")
    server.start()
    assert not catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    store(catalog, b"y")
    server.kill()
    server.forget()
    shutil.copytree(tmp_path / "old", server.folder, dirs_exist_ok=True)
    server.start()
    with pytest.raises(UnavailableError) as caught:
        present(catalog, b"x", b"y")
    assert caught.value.kind == LOST
    assert not catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert present(catalog, b"x", b"y") == [True, False]
    store(catalog, b"y")
    assert check_invariants(catalog.snapshot()) == []


def test_a_library_that_is_gone_is_loaded_again(server, catalog):
    store(catalog, b"x")
    server.say("FUNCTION", "FLUSH")
    assert present(catalog, b"x") == [True]


def test_libraries_of_two_versions_work_side_by_side(server, catalog):
    """During an upgrade engines of both use one catalog."""
    newer = library()
    name = newer.name + "_next"
    newer = Library(name, newer.source.replace(newer.name, name))
    other = ValkeyCatalog(server.url, CLOCK, link=Link(server.url, CLOCK, newer))
    assert not other.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    store(other, b"x")
    assert present(catalog, b"x") == [True]
    names = {dict(zip(row[::2], row[1::2], strict=True))[b"library_name"] for row in listed(server)}
    assert names == {library().name.encode(), name.encode()}
    other.close()


def listed(server) -> list[list[bytes]]:
    return [list(row) for row in server.say("FUNCTION", "LIST")]


def test_a_reply_that_was_lost_is_given_again(server, catalog):
    """As when the connection breaks after the server has done its work."""
    link = catalog._link
    operation = link.operation()
    link.operation = lambda: operation
    first = catalog.reserve(SPACE.namespace, 2, 60.0)
    assert catalog.reserve(SPACE.namespace, 2, 60.0) == first
    assert len(catalog.snapshot().reserved) == 2
    del link.operation
    number = [catalog.grow(SPACE.namespace), catalog.grow(SPACE.namespace)]
    assert number[0] != number[1], "each call has its own id"


def test_a_server_that_throws_records_away_is_refused(server):
    server.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="noeviction"):
        make(server).open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)


def test_a_full_server_takes_nothing_new_and_goes_on_with_the_rest(server, catalog):
    """Calls that failed opened the breaker, so hits were lost as well; and what gives memory back
    was refused, so it stayed full for good."""
    store(catalog, b"x")
    slots = catalog.reserve(SPACE.namespace, 2, 60.0)
    server.say("CONFIG", "SET", "maxmemory", "1mb")
    assert catalog.reserve(SPACE.namespace, 1, 60.0) == []
    assert catalog.grow(SPACE.namespace) is Refused.BUDGET
    assert present(catalog, b"x") == [True]
    begun = Commit(b"z" * 32, bytes(32), 0, slots[0], 0, 1)
    assert catalog.commit(SPACE.namespace, [begun]) == [Verdict.PUBLISHED]
    catalog.abort(SPACE.namespace, slots[1:])
    assert catalog.sweep([Want(SPACE.namespace, 8)], False).evicted_count == 2
    (number,) = catalog.segments()
    catalog.shrunk(number)
    assert check_invariants(catalog.snapshot()) == []
    server.say("CONFIG", "SET", "maxmemory", "0")
    assert catalog.grown(catalog.grow(SPACE.namespace))
    store(catalog, b"y")


def test_records_that_vanished_are_no_bug_of_ours(server, catalog):
    """An engine stood aside for good."""
    store(catalog, b"x")
    root = f"{{kvferry:{STORE.hex()}}}"
    url = f"valkey://{server.url.host}:{server.url.port}"
    opened = open_url(url, CLOCK)
    opened.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    failed_count = 0
    for name in ("totals", "shares", "segments", "spaces"):
        server.say("DEL", f"{root}:{name}")
        for verb in (opened.stats, opened.snapshot, lambda: opened.attach(SPACE), opened.sweep):
            try:
                verb()
            except (UnavailableError, CorruptError):  # and nothing else
                failed_count += 1
    assert failed_count > 0, "nothing was missing"
    opened.close()


def test_a_primary_that_became_a_replica_is_left(server, catalog):
    """After a failover the address may lead to another server; this one only says no."""
    store(catalog, b"x")
    first = {row["id"] for row in server.say("CLIENT LIST") if row["addr"] != row["laddr"]}
    server.say("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(UnavailableError, match="replica"):
        catalog.reserve(SPACE.namespace, 1, 60.0)
    server.say("REPLICAOF", "NO", "ONE")
    store(catalog, b"y")
    assert present(catalog, b"x", b"y") == [True, True]
    kept = {row["id"] for row in server.say("CLIENT LIST")} & first
    assert kept == set(), "the old connection is still used"


def test_a_wrong_password_is_said_without_the_password(server, caplog):
    server.say("CONFIG", "SET", "requirepass", "the right one")
    wrong = server.url_of(password="not this")
    catalog = ValkeyCatalog(wrong, CLOCK)
    with pytest.raises(ConfigError) as caught:
        catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    assert "refuses" in str(caught.value)
    assert "not this" not in f"{caught.value!r} {caught.value} {catalog!r} {wrong!r} {caplog.text}"
    right = ValkeyCatalog(server.url_of(password="the right one"), CLOCK)
    assert right.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    right.close()


def test_a_user_of_the_servers_access_list_needs_no_more_than_the_document_says(server):
    """docs/operations.md names these rights."""
    rights = "~{kvferry:*}* +@read +@write +@scripting +@connection +info +time -@dangerous +info"
    server.say("ACL", "SETUSER", "ferry", "on", ">secret", *rights.split())
    catalog = ValkeyCatalog(server.url_of("ferry", "secret"), CLOCK)
    assert catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    catalog.attach(SPACE)
    assert catalog.grown(catalog.grow(SPACE.namespace))
    store(catalog, b"x")
    assert present(catalog, b"x") == [True]
    catalog.sweep([Want(SPACE.namespace, 100)])
    catalog.close()
