"""An operator must be able to trust the counters: each event once, across processes, by name."""

import json
import threading

import prometheus_client
import pytest

from kvferry.errors import InternalError
from kvferry.metric import ANY, Kind
from kvferry.metric_table import METRICS
from kvferry.metrics import LABEL_VALUES_MAX, OTHERS, Metrics, merge, prometheus_exporter
from kvferry.pages.base import Outcome

LOADED = "kvferry_loaded_tokens_total"
LOOKUPS = "kvferry_lookups_total"
LOAD = "kvferry_load_seconds"
SIZE = "kvferry_transfer_read_size_bytes"


def test_no_count_is_lost_between_threads():
    metrics = Metrics()

    def count():
        for _ in range(5000):
            metrics.count(LOADED, 2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value(LOADED) == 40000


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("kvferry_loaded_token_total", {}),
        (LOOKUPS, {}),
        (LOOKUPS, {"outcome": "hti"}),
        (LOOKUPS, {"reason": "hit"}),
        (LOADED, {"outcome": "hit"}),
        ("kvferry_pages", {}),
    ],
)
def test_what_is_not_in_the_table_cannot_be_counted(name, labels):
    with pytest.raises(InternalError):
        Metrics().count(name, **labels)


def test_drains_give_each_event_exactly_once():
    metrics = Metrics()
    metrics.count(LOOKUPS, outcome="hit")
    metrics.observe(LOAD, 0.2)
    metrics.set("kvferry_pages", 7)
    first = metrics.drain()
    metrics.count(LOOKUPS, outcome="miss")
    metrics.observe(LOAD, 0.25)
    second = metrics.drain()
    assert first[LOOKUPS] == {"hit": 1}
    assert second[LOOKUPS] == {"miss": 1}
    assert merge([first, second]) == metrics.snapshot()
    assert metrics.value(LOOKUPS, outcome="hit") == 1
    assert metrics.drain() == {}


def test_a_gauge_is_drained_when_it_moves():
    metrics = Metrics()
    drained = []
    for page_count in (7, 7, 3):
        metrics.set("kvferry_pages", page_count)
        drained.append(metrics.drain())
    assert drained == [{"kvferry_pages": {"": 7}}, {}, {"kvferry_pages": {"": 3}}]
    assert metrics.snapshot() == {"kvferry_pages": {"": 3}}
    assert metrics.value("kvferry_pages") == 3


def test_snapshots_survive_json_and_merge_over_ranks():
    ranks = [Metrics(), Metrics()]
    for pending, rank in enumerate(ranks, 1):
        rank.count(LOADED, 64)
        rank.set("kvferry_loads_pending", pending)
        rank.observe(LOAD, 0.5)
    merged = merge(json.loads(json.dumps(rank.snapshot())) for rank in ranks)
    assert merged[LOADED] == {"": 128}
    assert merged["kvferry_loads_pending"] == {"": 2}
    assert sum(count for count, _ in merged[LOAD][""]) == 2


def test_a_snapshot_of_another_version_is_merged_as_far_as_it_is_known():
    assert merge([{"kvferry_from_the_future_total": {"": 1}, LOADED: {"": 5}}]) == {LOADED: {"": 5}}


def test_merging_leaves_its_sources_alone():
    metrics = Metrics()
    metrics.observe(LOAD, 0.5)
    source = metrics.snapshot()
    merge([source, source])
    assert source == metrics.snapshot()


def test_prometheus_shows_what_was_counted():
    registry = prometheus_client.CollectorRegistry()
    exporter = prometheus_exporter(registry)
    metrics = Metrics()
    for duration_s in (0.2, 0.4):
        metrics.count(LOOKUPS, outcome="hit")
        metrics.observe(LOAD, duration_s)
        metrics.set("kvferry_breaker_open", 1)
        exporter.observe(metrics.drain())
    assert registry.get_sample_value(LOOKUPS, {"outcome": "hit"}) == 2
    assert registry.get_sample_value(f"{LOAD}_count") == 2
    assert registry.get_sample_value(f"{LOAD}_sum") == pytest.approx(0.6)
    assert registry.get_sample_value(f"{LOAD}_bucket", {"le": "0.3"}) == 1
    assert registry.get_sample_value("kvferry_breaker_open") == 1


def test_every_metric_says_what_to_do():
    for metric in METRICS.values():
        assert metric.name.startswith("kvferry_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.meaning.endswith(".")
        assert metric.action.endswith(".")
        assert sum(values is not ANY for values in metric.labels.values()) <= 1


def test_every_outcome_of_a_page_store_is_a_reason():
    bad = {outcome.value for outcome in Outcome} - {Outcome.OK.value}
    for name in ("kvferry_load_failures_total", "kvferry_store_drops_total"):
        assert bad <= set(METRICS[name].labels["reason"])


def test_peers_are_told_apart_up_to_a_bound():
    """They come and go: whoever keeps the metrics would keep them all."""
    registry = prometheus_client.CollectorRegistry()
    exporter = prometheus_exporter(registry)
    metrics = Metrics()
    for number in range(LABEL_VALUES_MAX + 5):
        metrics.observe(SIZE, 5000, peer=f"a,b port {number}")
    metrics.observe(SIZE, 1 << 40, peer="a,b port 3")
    exporter.observe(metrics.drain())
    found = {"peer": "a;b port 3"}
    assert registry.get_sample_value(f"{SIZE}_count", found) == 2
    assert registry.get_sample_value(f"{SIZE}_bucket", {**found, "le": "16384.0"}) == 1
    assert registry.get_sample_value(f"{SIZE}_count", {"peer": OTHERS}) == 5
