"""What the measurements of real engines conclude from what they saw."""

import json
from xml.etree import ElementTree

import pytest

pytest.importorskip("kvferry._native", reason="benchmarks need the native extension")

from kvferry.cli import (
    bench_interference,
    bench_peers,
    bench_ttft,
    blocking_calls,
    engine_runs,
    shapes,
    ttft_plot,
)
from kvferry.cli.engine_process import cause
from kvferry.cli.paced_pages import PacedPages
from kvferry.errors import ConfigError
from kvferry.layout import PageGeometry
from kvferry.pages.base import Extent, Outcome, Result
from kvferry.testing.clock import ManualClock

ENGINE_THREAD, OTHER_THREAD = 7, 8


def event(category, name, start, length, thread=ENGINE_THREAD, **arguments):
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread,
        "args": arguments,
    }  # fmt: skip


def counted(tmp_path, *events):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": list(events)}))
    return blocking_calls.count(trace, ENGINE_THREAD)


OURS = "kvferry/device/gpu.py(300): finish"
VLLMS = "/home/kvferry/.venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py(1): execute"


def test_a_call_that_blocks_the_engines_thread_inside_kvferry_is_found(tmp_path):
    found = counted(
        tmp_path,
        event("python_function", VLLMS, 0, 100),
        event("python_function", OURS, 10, 20),
        event("cuda_runtime", "cudaEventSynchronize", 15, 5),
    )
    assert found["blocking_of_kvferry"] == {"cudaEventSynchronize": 1}
    assert found["places_of_kvferry"] == [OURS]


def test_a_copy_of_memory_that_is_not_pinned_blocks_under_another_name(tmp_path):
    found = counted(
        tmp_path,
        event("python_function", OURS, 10, 20),
        event("cuda_runtime", "cudaMemcpyAsync", 15, 5, correlation=3),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 16, 5, thread=0, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 22, 5, correlation=4),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 23, 5, thread=0, correlation=4),
    )
    assert found["blocking_of_kvferry"] == {"cudaMemcpyAsync": 1}


def test_what_vllm_other_threads_and_the_benchmark_do_is_not_kvferrys(tmp_path):
    found = counted(
        tmp_path,
        event("python_function", "kvferry/cli/decode_steps.py(1): run", 0, 1000),
        event("python_function", VLLMS, 0, 100),
        event("cuda_runtime", "cudaStreamSynchronize", 15, 5),
        event("python_function", f"/site/{OURS}", 200, 20, thread=OTHER_THREAD),
        event("cuda_runtime", "cudaStreamSynchronize", 205, 5, thread=OTHER_THREAD),
        event("python_function", OURS, 300, 20),
        event("cuda_runtime", "cudaLaunchKernel", 305, 5),
    )
    assert found["blocking_of_kvferry"] == {}
    assert found["blocking"] == {"cudaStreamSynchronize": 1}
    assert (found["calls"], found["frames_of_kvferry"]) == (2, 1)


def test_only_steps_that_did_nothing_but_decode_are_compared():
    decoding, mixed = (5.0, 32, 0, 0, 1), (90.0, 5000, 1, 0, 1)
    steps = [decoding] * 6 + [mixed] + [decoding] * 5
    assert bench_interference._pure({"steps": steps}) == [5.0] * 5


def test_steps_during_stores_are_those_with_writes_at_both_ends():
    idle, writing = (5.0, 32, 0, 0, 0), (6.0, 32, 0, 0, 9)
    steps = [idle] * 4 + [writing] * 3 + [idle]
    assert bench_interference._pure({"steps": steps}, "writes") == [6.0, 6.0]
    assert bench_interference._pure({"steps": steps}, "reads") == []


class EndsAtOnce:
    """A page store in which everything has ended when it is asked."""

    def __init__(self):
        self._results = []

    def submit_reads(self, extents):
        self._results += [Result(1, index, Outcome.OK) for index in range(len(extents))]
        return 1

    def poll(self):
        results, self._results = self._results, []
        return results


def test_a_slow_disk_is_as_slow_as_it_is_said_to_be():
    clock = ManualClock()
    geometry = PageGeometry(1, 8192 - 4096, 16)
    extent = Extent(None, geometry, None, 0, 1, 0)
    pages = PacedPages(EndsAtOnce(), clock, read_bytes_per_s=8192)
    pages.submit_reads([extent, extent])
    assert (pages.poll(), pages.reads.pending_count) == ([], 2)
    clock.advance(1.1)
    assert [result.index for result in pages.poll()] == [0]
    clock.advance(1.0)
    assert [result.index for result in pages.poll()] == [1]
    assert (pages.reads.pending_count, pages.reads.good_bytes) == (0, 16384)


def test_a_slow_disk_does_not_make_anybody_wait_longer_than_it_takes():
    clock = ManualClock()
    waits = []

    class Idle(EndsAtOnce):
        def wait(self, timeout_s):
            waits.append(timeout_s)
            clock.advance(timeout_s)
            return self.poll()

    extent = Extent(None, PageGeometry(1, 4096, 16), None, 0, 1, 0)
    pages = PacedPages(Idle(), clock, read_bytes_per_s=8192)
    pages.submit_reads([extent])
    assert pages.poll() == []
    assert len(pages.wait(60.0)) == 1
    assert waits == [1.0]


def test_the_cause_of_an_engines_death_is_its_last_error(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO starting\nTraceback (most recent call last):\n  File\n"
        "(EngineCore pid=3) ValueError: not enough values to unpack (expected 5, got 4)\nbye\n"
    )
    assert cause(log) == "ValueError: not enough values to unpack (expected 5, got 4)"
    log.write_text("Killed\n")
    assert cause(log).endswith("Killed\n")


def test_a_prompt_is_the_same_in_every_process_and_within_the_vocabulary():
    shape = shapes.shape_of("tiny")
    prompt = shapes.prompt(shape, 1000, "0")
    assert prompt == shapes.prompt(shape, 1000, "0") != shapes.prompt(shape, 1000, "1")
    assert min(prompt) >= 0 and max(prompt) < shape.vocab_size


@pytest.mark.parametrize(
    "wrong", [{"shape": "9b"}, {"lengths": "many"}, {"mode": "fast"}, {"settings": "[1]"}]
)
def test_a_wrong_word_is_refused_before_an_engine_starts(tmp_path, wrong):
    right = {"shape": "tiny", "lengths": "100", "mode": "eager", "settings": "{}"}
    with pytest.raises(ConfigError):
        engine_runs.parse_plan(str(tmp_path), prompt_count=1, options="{}", **(right | wrong))


def test_peers_are_chosen_by_the_beginning_of_their_names():
    assert [peer.name for peer in bench_peers.chosen("hf3fs")] == ["hf3fs"]
    assert len(bench_peers.chosen("offloading,hf3fs")) == len(bench_peers.PEERS)
    assert bench_peers.chosen("") == []
    with pytest.raises(ConfigError):
        bench_peers.chosen("lmcache")


def test_the_plot_has_a_line_for_each_case():
    drawn = ttft_plot.svg("a < b", {"cold": [(1000, 20.0), (20000, 600.0)], "hit": [(1000, 5.0)]})
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawn).iter()]
    assert (tags.count("polyline"), tags.count("circle")) == (2, 3)


class ScriptedEngine:
    """Answers every prompt from its own cache of kvferry's pages, as told."""

    def __init__(self, **changes):
        self._answer = {"ms": 5.0, "cached_tokens": 512, "tokens": [1, 2], "logprobs": [-0.5, -0.1]}
        self._metrics = changes.pop("metrics", {})
        self._read_step = changes.pop("read_bytes", 1 << 20)
        self._answer |= changes
        self._read_bytes = 0

    def call(self, operation, **_):
        if operation == "traffic":
            self._read_bytes += self._read_step
            return {"read_bytes": self._read_bytes}
        return self._metrics if operation == "metrics" else [self._answer]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"cached_tokens": 448}, "448 were there, not 512"),
        ({"read_bytes": 100}, "only 100 bytes read"),
        ({"tokens": [1, 3]}, "other tokens"),
        ({"logprobs": [-0.5, -0.2]}, "other logprobs"),
        ({"metrics": {"kvferry_load_failures:corrupt": 2.0}}, "kvferry_load_failures:corrupt 2"),
    ],
)
def test_a_load_that_is_not_what_it_seems_is_wrong(tmp_path, changes, words):
    plan = engine_runs.parse_plan(str(tmp_path), "tiny", "520", 1, "eager", "{}", "{}")
    bench = bench_ttft.Bench(plan, ManualClock())
    bench.engines.facts = {"element_bytes": 4}
    bench.prompts = engine_runs.Prompts(plan, 64)
    bench.own_hits = ScriptedEngine().call("ask")
    bench.loaded(ScriptedEngine(**changes), "loaded")
    assert len(bench.wrong) == (words is not None)
    assert all(words in line for line in bench.wrong)
