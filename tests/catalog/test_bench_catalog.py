"""The measurement measures: every figure of a tiny catalog is there and is a duration or a rate."""

from kvferry.cli import bench_catalog


def leaves(value):
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value]


def test_all_figures_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_catalog, "CHAIN_COUNT", 1024)
    monkeypatch.setattr(bench_catalog, "two_processes", lambda *_: {"median": 1.0})
    figures = bench_catalog.run(tmp_path / "catalog", page_count=2048, round_count=2)
    assert figures["pages"] == 2048
    assert set(figures["lookup_ms"]) == {"packed", "objects", "half_missing"}
    assert all(number > 0 for number in leaves(figures))


def test_all_figures_of_a_server_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_catalog, "CHAIN_COUNT", 1024)
    monkeypatch.setattr(bench_catalog, "two_processes", lambda *_: {"median": 1.0})
    figures = bench_catalog.run_on_server(tmp_path / "server", page_count=2048, round_count=2)
    assert figures["pages"] == 2048
    assert 100 < figures["bytes_per_page"] < 1000
    assert all(number for number in leaves(figures))


def test_a_process_of_two_stores_beside_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_catalog, "CHAIN_COUNT", 1024)
    url = f"lmdb://{tmp_path}"
    catalog = bench_catalog.open_catalog(url, bench_catalog.SystemClock())
    bench_catalog.Stores(catalog, bench_catalog.SystemClock(), bench_catalog.space(1), 0).store(
        2048
    )
    for number in (2, 3):
        assert bench_catalog.one_of_two(url, 2, number)["store"]["pages_per_s"] > 0
    assert [space.page_count for space in catalog.stats().spaces] == [2048, 1024, 1024]
    catalog.close()
