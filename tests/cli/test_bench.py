"""A measurement that does not run, or measures nothing, is worse than none."""

import pytest

pytest.importorskip("kvferry._native", reason="benchmarks need the native extension")

from kvferry.cli import bench, bench_scheduler


def test_the_scheduler_benchmark_measures_every_phase(tmp_path):
    result = bench_scheduler.run(tmp_path, request_count=4, step_count=20)
    for phase in ("admission_us", "step_us", "step_during_lookups_us"):
        assert 0 < result[phase]["median"] <= result[phase]["max"]


def test_nested_results_become_lines():
    result = {"cores": 2, "read": {"fio": {"rate": 1.5, "cpu": 2}}, "step": {"median": 3}}
    assert bench.lines(result) == [
        ("cores", "2"),
        ("read: fio", "rate 1.5, cpu 2"),
        ("step", "median 3"),
    ]
