"""The measurements of real engines run, and see what is wrong: once, with a tiny model. They need
six engines, so they run with the slow tests; their parts are tested in tests/cli."""

import pytest

from kvferry.cli import bench_interference, bench_peers, bench_transfer, bench_ttft, smollm
from kvferry.cli.engine_runs import Prompts, parse_plan
from kvferry.clock import SystemClock
from kvferry.config import cache_folder
from tests.e2e.store import UNHURRIED

TOKENS = 520
LOADED = 512
OPTIONS = {"chunk_tokens": 64, **UNHURRIED}


def plan(folder):
    found = parse_plan(str(folder), "tiny", str(TOKENS), 1, "eager", "{}", "{}")
    found.options.update(OPTIONS)
    return found


@pytest.mark.slow
def test_time_to_first_token_is_measured_and_every_answer_checked(tmp_path):
    bench = bench_ttft.Bench(plan(tmp_path), SystemClock())
    result = bench.run()
    assert result["wrong"] == []
    [row] = result["lengths"]
    assert row["loaded_tokens"] == LOADED
    cases = {"cold", "own_hit", "storing", "loaded_same_process", "loaded"}
    assert row["median_ms"].keys() == cases
    assert all(ms > 0 for ms in row["median_ms"].values())
    assert row["link_ms"] > 0


@pytest.mark.slow
def test_a_peer_that_does_not_start_says_why_and_the_others_go_on(tmp_path):
    """vLLM's own connectors refuse a CPU, which is as good a failure as any."""
    clock = SystemClock()
    bench = bench_ttft.Bench(plan(tmp_path), clock)
    peers = bench_peers.chosen("offloading_host")
    bench.prompts = Prompts(bench.plan, 64)
    bench.engines.facts = {"element_bytes": 4}
    found = bench_peers.Contest(bench, clock).run(peers)
    assert "only supported on CUDA" in found["offloading_host"]["failed"]
    assert found["offloading_host"]["lengths"] == []


@pytest.mark.slow
def test_interference_is_measured_in_every_part(tmp_path):
    load = bench_interference.Load(rounds=1, arrivals=1, steps=20)
    bench = bench_interference.Bench(plan(tmp_path), load, SystemClock())
    result = bench.run(bench_interference.PARTS)
    assert result["prefill"]["stored_share"] == 1.0
    assert result["decode"]["step_counts"]["idle_connector"] > 0
    assert result["profile"]["kvferry"]["frames_of_kvferry"] > 0
    assert len(result["slow"]["ratios_to_recomputed"]) == load.slow_prompts
    # With a model as small as this one nothing lasts as long as a step, and on a busy machine
    # loading may well pay.
    expected = ("requests alone", "no load was declined")
    assert [line for line in result["wrong"] if not any(map(line.count, expected))] == []


@pytest.mark.slow
def test_what_another_engine_prefilled_is_measured_beside_the_connector_of_vllm(tmp_path):
    pytest.importorskip("nixl", reason="vLLM asks for it: pip install --no-deps nixl")
    model = smollm.model_folder(cache_folder())
    result = bench_transfer.Bench(tmp_path, model, SystemClock(), (100,), 2).run(1)
    assert result["wrong"] == []
    [row] = result["lengths"]
    assert row["ratio"] > 0
    assert all(ms > 0 for ms in row["handed_over_ms"].values())
    assert all(ms > 0 for [ms] in result["handshake_ms"].values())
    for found in result["first_request_ms"].values():
        assert found.keys() == {"first producer", "second producer"}
