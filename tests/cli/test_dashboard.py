"""The page that is opened at night: it must not say that all is well when it is not, nor give what
it knows to strangers, nor run what others have put into a name."""

import importlib.util
import json
import random
import socket
import threading
from pathlib import Path

import pytest

from kvferry.catalog.base import HotPage, SpaceStats
from kvferry.cli.view.engines import EngineWatch, read_page
from kvferry.cli.view.history import History, series
from kvferry.cli.view.store import prefixes_of
from kvferry.errors import ConfigError, UnavailableError
from kvferry.metric_table import METRICS
from tests.cli.browser import BROWSER, DRIVER, browsing
from tests.cli.metrics_engine import MetricsEngine
from tests.cli.routed import wait_until
from tests.cli.viewed import MODEL_A, MODEL_B, TOKEN, A, Filled, keys, showing, space

needs_server = pytest.mark.skipif(
    importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed"
)
EVIL = "<img src=x onerror=\"document.title='owned'\">"
NAME_A = A.namespace.hex()[:12]


@pytest.fixture
def filled(tmp_path):
    filled = Filled(tmp_path).fill()
    yield filled
    filled.close()


@pytest.fixture
def engines():
    engines = [MetricsEngine(MODEL_A), MetricsEngine(MODEL_B)]
    yield engines
    for engine in engines:
        engine.close()


def dashboard(filled, engines, **more):
    listed = [part for engine in engines for part in ("--engine", engine.url)]
    command = ("dashboard", filled.root, "--catalog", filled.url, "--interval-s", "0.2")
    return showing(*command, *listed, **more)


def wait_for(shown, holds):
    wait_until(lambda: (state := shown.state()) and holds(state))
    return shown.state()


@needs_server
def test_it_shows_what_catalog_and_engines_say(filled, engines):
    with dashboard(filled, engines) as shown:
        state = wait_for(
            shown, lambda s: s["store"]["is_up"] and all(e["is_up"] for e in s["engines"])
        )
        look = state["store"]["look"]
        assert (look["capacity_bytes"], look["evicted"]) == (8 << 20, 1)
        assert {s["model"]: s["pages"] for s in look["namespaces"]} == {MODEL_A: 30, MODEL_B: 4}
        assert [e["model"] for e in state["engines"]] == [MODEL_A, MODEL_B]
        hottest = state["prefixes"][0]
        assert hottest["key"] == keys("system prompt", 1)[0].hex()[:12]
        assert (hottest["pages"], hottest["tokens"]) == (20, 20 * 64)
        filled.look(A, "nothing", 10)
        wait_for(shown, lambda s: s["recent"]["namespaces"][NAME_A] == {"lookups": 10, "hits": 0})
        engines[0].metrics.count("kvferry_load_bytes_total", 1 << 30)
        engines[0].metrics.count("kvferry_store_drops_total", 5, reason="late")
        state = wait_for(shown, lambda s: s["bandwidth"]["load"] > 0 and s["reasons"])
        wait_for(
            shown,
            lambda s: (
                s["reasons"]["store_drops_total"]
                == [{"reason": "late", "recent": 5.0, "ever": 5.0}]
            ),
        )


@needs_server
def test_what_is_wrong_is_said_and_goes_away(filled, engines):
    def wrongs(state):
        return " ".join(one["what"] for one in state["wrong"])

    with dashboard(filled, engines) as shown:
        filled.hold()
        wait_for(shown, lambda s: s["wrong"] == [] and s["engines"][1]["is_up"])
        engines[0].metrics.set("kvferry_breaker_open", 1)
        engines[1].content = b"\xff\x00 no such page {" * 1000
        wait_for(shown, lambda s: "is open" in wrongs(s))
        engines[0].metrics.set("kvferry_breaker_open", 0)
        wait_for(shown, lambda s: "is open" not in wrongs(s))
        engines[0].close()
        wait_for(shown, lambda s: f"{engines[0].name} does not answer" in wrongs(s))
        filled.root.rename(filled.root.with_name("away"))
        state = wait_for(shown, lambda s: "cannot be read" in wrongs(s))
        assert state["store"]["look"]["evicted"] == 1, "the last figures stay, marked as old"
        filled.root.with_name("away").rename(filled.root)
        wait_for(shown, lambda s: "cannot be read" not in wrongs(s))


@needs_server
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_garbage_does_no_harm_and_strangers_see_nothing(filled, seed):
    chance = random.Random(seed)
    with dashboard(filled, [], token=TOKEN) as shown:
        for path in ("/", "/page.js", "/page.css"):
            code, headers, body = shown.get(path, Authorization=None)
            assert code == 200
            assert "default-src 'none'" in headers["content-security-policy"]
            assert b"://" not in body.replace(b"http://www.w3.org/2000/svg", b"").replace(
                b"http://host:8000/metrics", b""
            ), "nothing is loaded from elsewhere"
        assert shown.get("/state.json", Authorization="Bearer wrong")[0] == 401
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", shown.port), timeout=30) as connection:
                try:
                    connection.sendall(chance.randbytes(chance.randrange(1, 3000)) + b"\r\n\r\n")
                    said = connection.makefile("rb").read()
                except ConnectionError:
                    continue
                assert said == b"" or said.startswith(b"HTTP/1.1 4")
        state = wait_for(shown, lambda s: s["refused"].get("malformed", 0) >= 30)
        assert state["refused"]["token"] == 1


@needs_server
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium and chromedriver are not installed")
def test_a_person_can_read_it_in_a_browser(filled, engines, tmp_path):
    """Dark and light, narrow and wide; names from elsewhere are text, whatever they say."""
    evil = space(b"e", EVIL, 65536)
    filled.catalog.attach(evil)
    with (
        dashboard(filled, engines, token=TOKEN) as shown,
        browsing(tmp_path / "browser") as browser,
    ):
        wait_for(shown, lambda s: s["engines"][1]["is_up"])
        browser.look(1400, 900)
        browser.open(f"http://127.0.0.1:{shown.port}/")
        wait_until(lambda: "Token of this page" in browser.text())
        assert "meta" not in browser.text()
        browser.run(
            "document.getElementById('token').value = arguments[0];"
            "document.querySelector('button').click()",
            "not the right token",
        )
        wait_until(lambda: "That is not the token." in browser.text())
        browser.open(f"http://127.0.0.1:{shown.port}/?again#token={TOKEN.replace(' ', '%20')}")
        wait_until(lambda: MODEL_A in browser.text())
        assert TOKEN not in browser.run("return location.href")
        engines[0].metrics.set("kvferry_standing_aside", 1)
        wait_until(lambda: "stands aside in engine" in browser.text())
        assert EVIL[:40] in browser.text()
        assert browser.run("return document.title") == "✗ kvferry"
        backgrounds = set()
        for width, scheme in [(1400, "light"), (1400, "dark"), (400, "light"), (320, "dark")]:
            browser.look(width, 900, scheme)
            assert browser.run("return document.documentElement.scrollWidth") <= width
            backgrounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
            contrasts = browser.run(CONTRASTS)
            assert min(contrasts) >= 4.5, "text that is hard to read"
            assert browser.picture().startswith(b"\x89PNG")
        assert len(backgrounds) == 2
        shown.process.kill()
        wait_until(lambda: "does not answer" in browser.text())
        assert MODEL_A in browser.text(), "what was known stays, with its age"
        complaints = [line for line in browser.log() if "state.json" not in line]
        assert complaints == []


CONTRASTS = """
function channels(text) { return text.match(/[\\d.]+/g).map(Number); }
function light(text) {
  const parts = channels(text).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}
function ground(node) {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if ((channels(colour)[3] ?? 1) > 0) return colour;
  }
  return "rgb(255,255,255)";
}
const found = [];
for (const node of document.querySelectorAll("td, th, h1, h2, small, p, b, span, .tile div")) {
  if (!node.offsetParent || !node.textContent.trim()) continue;
  const pair = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
  found.push((pair[0] + 0.05) / (pair[1] + 0.05));
}
return found;
"""


# Parts.


def test_only_pages_of_engines_are_read():
    assert EngineWatch("http://10.0.0.1:8000").url == "http://10.0.0.1:8000/metrics"
    assert EngineWatch("http://u:secret@host:8000/m").name == "host:8000"
    for wrong in ("file:///etc/passwd", "10.0.0.1:8000", "ftp://host/metrics", "http://"):
        with pytest.raises(ConfigError):
            EngineWatch(wrong)


def test_an_engine_that_sends_elsewhere_or_talks_nonsense_does_not_answer():
    replies = [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"\x00\xff" * 50,
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 36\r\n\r\nvllm:kvferry_load_bytes{a=\x00 }}{ x y",
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            for reply in replies:
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        watch = EngineWatch(f"http://127.0.0.1:{server.getsockname()[1]}")
        for _ in replies:
            with pytest.raises(UnavailableError):
                watch.look()
        thread.join()


def test_all_engines_behind_one_page_are_added_up():
    look = read_page(
        [
            "# TYPE vllm:kvferry_load_bytes_total counter",
            'vllm:kvferry_load_bytes_total{engine="0",model_name="m"} 3.0',
            'vllm:kvferry_load_bytes_total{engine="1",model_name="m"} 4.0',
            'vllm:kvferry_breaker_open{engine="0",model_name="m"} 0.0',
            'vllm:kvferry_breaker_open{engine="1",model_name="m"} 1.0',
            'vllm:kvferry_store_drops_total{engine="1",model_name="m",reason="late"} 2.0',
            "something_else 7",
        ]
    )
    assert (look.model, look.sums, look.gauges) == (
        "m",
        {"load_bytes_total": 7.0},
        {"breaker_open": 1.0},
    )
    assert look.reasons["store_drops_total"] == {"late": 2.0}


def test_growth_is_what_was_added_and_a_restart_begins_from_zero():
    history = History(100.0)
    for now_s, value in ((0, 50), (10, 60), (20, 5), (30, 9)):
        history.add(now_s, {"a": value})
    assert history.grown("a", 100.0) == 10 + 5 + 4
    assert history.grown("a", 10.0) == 4
    assert history.rate("a", 20.0) == pytest.approx(0.45)
    history.add(200.0, {"a": 9})
    assert history.grown("a", 100.0) == 0


def test_a_series_spreads_what_came_between_two_looks():
    one, other = History(100.0), History(100.0)
    for step in range(11):
        one.add(2.0 * step, {"a": 20.0 * step})
        other.add(1 + 2.0 * step, {"a": 2.0 * step})
    points = series([one, other, History(9.0)], ["a"], 4.0, 50)
    assert [age_s for age_s, _ in points] == [16.0, 12.0, 8.0, 4.0, 0.0]
    assert [rate for _, rate in points[1:]] == pytest.approx([11.0] * 4)
    assert series([History(9.0)], ["a"], 4.0, 50) == []


def test_pages_are_told_apart_by_their_first_chunk():
    stats = SpaceStats(b"n" * 32, '{"model": "m"}', 5, 0, 0, 1, 4096, 16)
    first, second, third, lost = (bytes([n]) * 32 for n in range(1, 5))
    pages = [
        HotPage(first, bytes(32), 0, 0),
        HotPage(second, bytes(32), 0, 0),
        HotPage(third, first, 1, 3),
        HotPage(lost, b"?" * 32, 7, 4),
    ]
    found = [(p.key, p.pages, p.tokens, p.idle_minutes) for p in prefixes_of(stats, pages)]
    assert found == [("01" * 6, 2, 32, 0), ("02" * 6, 1, 16, 0), ("04" * 6, 1, 128, 4)]


def test_grafana_shows_metrics_that_there_are():
    """Each that it names is in the table; each of the exporter's gauges and counters is shown."""
    board = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    said = " ".join(
        target["expr"] for panel in board["panels"] for target in panel.get("targets", [])
    )
    words = set(
        said.replace("(", " ").replace("{", " ").replace("[", " ").replace(":", " ").split()
    )
    named = {word for word in words if word.startswith("kvferry_")}
    histograms = {f"{n}_{end}": n for n in METRICS for end in ("bucket", "sum", "count")}
    assert {histograms.get(name, name) for name in named} <= METRICS.keys()
    exported = {name for name in METRICS if name.startswith("kvferry_exporter_")}
    in_bytes = {"kvferry_exporter_segments", "kvferry_exporter_tenant_segments"}
    assert exported - in_bytes - {"kvferry_exporter_graced_slots"} <= named
    for name in named:
        prefixed = f"vllm:{name}" in said
        assert prefixed != name.startswith("kvferry_exporter_"), name
