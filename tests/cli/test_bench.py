"""A measurement that does not run, or measures nothing, is worse than none."""

import pytest

pytest.importorskip("kvferry._native", reason="benchmarks need the native extension")

from kvferry.cli import bench, bench_scheduler


def test_the_planner_is_measured_in_every_phase(tmp_path):
    result = bench_scheduler.drive_planner(tmp_path, request_count=4, step_count=20)
    for phase in ("admission_us", "step_us", "step_during_lookups_us"):
        assert 0 < result[phase]["median"] <= result[phase]["max"]


@pytest.mark.slow
def test_the_connector_is_measured_below_vllms_own_scheduler(tmp_path):
    pytest.importorskip("vllm", reason="without vLLM the planner alone is measured")
    result = bench_scheduler.run(tmp_path, request_count=4, step_count=20)
    assert result["driven_by"] == "vLLM's scheduler"
    for phase in ("step_us", "step_during_lookups_us", "schedule_us", "arrival_us", "finish_us"):
        assert 0 < result[phase]["median"] <= result[phase]["max"]
    assert "build_connector_meta" in result["step_medians_us"]
    assert result["loaded_requests"] == result["admitted_requests"] == 4
    assert result["lookups"] > 0


def test_nested_results_become_lines():
    result = {"cores": 2, "read": {"fio": {"rate": 1.5, "cpu": 2}}, "step": {"median": 3}}
    assert bench.lines(result) == [
        ("cores", "2"),
        ("read: fio", "rate 1.5, cpu 2"),
        ("step", "median 3"),
    ]
