"""Alerts hang on these figures, so they must be right, and say so when nobody knows them; and a
port that strangers can reach must neither tell them anything nor fall over."""

import importlib.util
import random
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from kvferry.catalog.valkey import ValkeyCatalog
from kvferry.catalog.valkey_server import OwnServer, free_port
from kvferry.cli.main import app
from kvferry.errors import ConfigError
from kvferry.metric import Kind
from kvferry.metric_table import METRICS
from kvferry.server_url import ServerUrl
from tests.cli.routed import wait_until
from tests.cli.viewed import CLOCK, MODEL_A, MODEL_B, TOKEN, A, B, Filled, ask, showing

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed"
)

OF_A = {"namespace": A.namespace.hex()[:12], "model": MODEL_A}
OF_B = {"namespace": B.namespace.hex()[:12], "model": MODEL_B}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    filled = Filled(tmp_path_factory.mktemp("store")).fill()
    yield filled
    filled.close()


@pytest.fixture(scope="module")
def shown(filled):
    with showing("exporter", filled.root, "--catalog", filled.url, "--interval-s", "0.2") as shown:
        wait_until(lambda: shown.value("up") == 1)
        yield shown


def test_the_figures_are_the_catalogs(shown):
    expected = {"capacity_bytes": 8 << 20, "used_bytes": 4 << 20, "published_total": 35}
    expected |= {"evictions_total": 1, "duplicates_total": 0, "reservations_expired_total": 0}
    assert {name: shown.value(name) for name in expected} == expected
    of_a = {"pages": 30, "page_bytes": 30 * 65536, "segments": 3, "reserved_slots": 5}
    of_a |= {"lookup_chunks_total": 40, "hit_chunks_total": 30, "graced_slots": 1}
    assert {name: shown.value(name, **OF_A) for name in of_a} == of_a
    of_b = {"pages": 4, "lookup_chunks_total": 8, "hit_chunks_total": 0, "segments": 1}
    assert {name: shown.value(name, **OF_B) for name in of_b} == of_b


def test_what_is_shown_is_the_table(shown, filled):
    wait_until(lambda: shown.value("engines") is not None)
    families = text_string_to_metric_families(shown.get("/metrics")[2].decode())
    found = {
        family.name + "_total" * (family.type == "counter"): (
            family.type,
            set().union(*(sample.labels for sample in family.samples)),
        )
        for family in families
    }
    assert found == {
        metric.name: (metric.kind.value, set(metric.labels))
        for metric in METRICS.values()
        if metric.name.startswith("kvferry_exporter_") and metric.kind is not Kind.HISTOGRAM
    }


def test_engines_that_hold_the_store_are_counted(shown, filled):
    wait_until(lambda: shown.value("engines") == 0)
    filled.hold()
    wait_until(lambda: shown.value("engines") == 1)


@pytest.mark.slow
def test_a_catalog_that_comes_and_goes_is_seen(tmp_path):
    """It starts before there is a store, and says what is missing."""
    late = Filled(tmp_path)
    missing = tmp_path / "later"
    with showing("exporter", missing, "--catalog", late.url, "--interval-s", "0.1") as shown:
        wait_until(lambda: any("no store" in line for line in shown.said))
        assert shown.value("up") == 0
        assert shown.value("capacity_bytes") is None
        late.root.rename(missing)
        late.fill()
        wait_until(lambda: shown.value("up") == 1)
        assert shown.value("pages", **OF_A) == 30
        late.catalog.close()
        (tmp_path / "catalog").rename(tmp_path / "away")
        wait_until(lambda: shown.value("up") == 0)
        assert shown.value("pages", **OF_A) is None
        assert shown.value("sample_age_seconds") > 0
        (tmp_path / "away").rename(tmp_path / "catalog")
        wait_until(lambda: shown.value("up") == 1)


def test_a_server_that_hangs_makes_nobody_wait(filled):
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"valkey://:a-secret-word@127.0.0.1:{silent.getsockname()[1]}"
        with showing("exporter", filled.root, "--catalog", url, "--interval-s", "0.1") as shown:
            assert [shown.value("up") for _ in range(20)] == [0] * 20
            wait_until(lambda: len(shown.said) > 1)
            assert "a-secret-word" not in "".join(shown.said)


@pytest.mark.parametrize("command", ["exporter", "dashboard"])
@pytest.mark.parametrize(
    ("host", "token", "words"),
    [("0.0.0.0", "", "needs a token"), ("::", "", "needs a token"), ("::", "short", "16 bytes")],
)
def test_strangers_are_not_served_without_a_token(filled, monkeypatch, command, host, token, words):
    monkeypatch.setenv("KVFERRY_VIEW_TOKEN", token)
    result = CliRunner().invoke(app, [command, str(filled.root), "--host", host])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_the_token_opens_and_nothing_else_does(filled, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with showing("exporter", filled.root, "--host", "0.0.0.0", "--token-file", file) as shown:
        for wrong in (None, "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xff"):
            code, headers, body = shown.get("/metrics", Authorization=wrong)
            assert (code, headers["www-authenticate"]) == (401, "Bearer")
            assert b"kvferry_" not in body
        code, _, body = shown.get("/metrics", Authorization=f"bearer {TOKEN}")
        assert code == 200
        assert b'requests_refused_total{reason="token"} 5.0' in body
        assert TOKEN not in "".join(shown.said)


def test_a_page_from_elsewhere_cannot_look_through_a_browser(shown):
    before = shown.value("requests_refused_total", reason="host")
    for name in ("evil.example", "127.0.0.1.evil.example", "", "[::2]:80"):
        assert ask(shown.port, "/metrics", {"Host": name})[0] == 421
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:9731"):
        assert ask(shown.port, "/metrics", {"Host": name})[0] == 200
    assert shown.value("requests_refused_total", reason="host") == before + 4


def rubbish(chance):
    kinds = [
        lambda: chance.randbytes(chance.randrange(1, 4000)),
        lambda: b"GET /" + chance.randbytes(40) + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20000,
        lambda: b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
        lambda: b"GET / HTTP/9.9\r\n\r\n",
        lambda: b"\r\n" * 5 + b"\x00" * 100 + b"\r\n\r\n",
    ]
    return chance.choice(kinds)() + b"\r\n\r\n"


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_garbage_is_refused_and_counted_and_the_server_lives(shown, seed):
    def refused():
        reasons = METRICS["kvferry_exporter_requests_refused_total"].labels["reason"]
        return {r: shown.value("requests_refused_total", reason=r) for r in reasons}

    def throw(number):
        chance = random.Random(f"{seed} {number}")
        with socket.create_connection(("127.0.0.1", shown.port), timeout=30) as connection:
            try:
                connection.sendall(rubbish(chance))
                if chance.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                said = connection.makefile("rb").read()
            except ConnectionError:
                return
        assert said == b"" or said.startswith(b"HTTP/1.1 4")
        assert b"kvferry" not in said

    before = refused()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(throw, range(60)))
    after = refused()
    assert sum(after.values()) - sum(before.values()) >= 60
    assert after["malformed"] > before["malformed"]
    assert shown.value("up") == 1


def test_connections_that_say_nothing_keep_nobody_out_for_long(shown):
    idle = [socket.create_connection(("127.0.0.1", shown.port)) for _ in range(200)]
    try:
        for connection in idle[100:]:
            connection.settimeout(30)
            assert connection.recv(1) in (b"",)
    except ConnectionError:
        pass
    finally:
        for connection in idle:
            connection.close()
    wait_until(lambda: shown.value("requests_refused_total", reason="busy") >= 100)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_when_it_is_told_to(filled, number):
    with showing("exporter", filled.root) as shown:
        shown.process.send_signal(number)
        assert shown.process.wait(30) == 0


def test_a_port_that_is_taken_is_said(filled):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["exporter", str(filled.root), "--port", port])
    assert isinstance(result.exception, ConfigError)
    assert "ddress already in use" in str(result.exception)


def test_a_server_that_dies_and_comes_back_is_seen(tmp_path):
    """The catalog of many hosts, with a password from the environment."""
    url = ServerUrl("127.0.0.1", free_port(), 0, False, None, "of the catalog", None)
    server = OwnServer(tmp_path / "server", url, CLOCK)
    server.start()
    filled = Filled(tmp_path, ValkeyCatalog(url, CLOCK)).fill()
    try:
        command = ("exporter", filled.root, "--catalog", url.name, "--interval-s", "0.1")
        with showing(*command, KVFERRY_CATALOG_PASSWORD="of the catalog") as shown:
            wait_until(lambda: shown.value("up") == 1)
            assert shown.value("pages", **OF_A) == 30
            assert shown.value("hit_chunks_total", **OF_A) == 30
            server.stop()
            wait_until(lambda: shown.value("up") == 0)
            assert shown.value("pages", **OF_A) is None
            server.start()
            wait_until(lambda: shown.value("up") == 1)
            assert "of the catalog" not in "".join(shown.said)
    finally:
        server.stop()


@pytest.mark.parametrize("command", ["exporter", "dashboard"])
def test_what_is_missing_is_named(filled, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "kvferry.cli.view.server", raising=False)
    monkeypatch.delattr("kvferry.cli.view.server", raising=False)
    result = CliRunner().invoke(app, [command, str(filled.root)])
    assert isinstance(result.exception, ConfigError)
    assert "pip install kvferry[dashboard]" in str(result.exception)
