"""Replays of traces: the fast cache is the catalog's own behaviour, and the optimum is one."""

import itertools
import json
import random

import pytest

from kvferry.catalog.base import AGE_STEP_S, Commit, Policy, Space, Want
from kvferry.catalog.memory import MemoryCatalog
from kvferry.cli import bench_trace, trace_cache, trace_peers
from kvferry.cli.trace_cache import PrefixCache, Request, key_of
from kvferry.testing.clock import ManualClock

SLOTS = 24
ROOT = bytes(32)


def random_requests(seed: int, count: int) -> list[Request]:
    """Prompts along a tree of prefixes, some branches of which come back."""
    chance, ids, requests, at_s = random.Random(seed), {}, [], 0.0
    for _ in range(count):
        at_s += chance.choice([0.0, 3.0, AGE_STEP_S, 4 * AGE_STEP_S])
        branches = [chance.choice([0, 0, 1, chance.randrange(40)]) for _ in range(5)]
        path = tuple(branches[: chance.randint(1, 5)])
        prefixes = itertools.accumulate((branch,) for branch in path)
        requests.append(Request(at_s, [ids.setdefault(p, len(ids)) for p in prefixes]))
    return requests


class RealCache:
    """The same questions to a catalog without a grace time."""

    def __init__(self, policy: Policy):
        self.clock = ManualClock(start_s=0.0)
        self.catalog = MemoryCatalog(self.clock, 0.0, policy)
        self.catalog.open(b"s" * 16, 1 << 20, 1 << 20)
        self.space = Space(b"n" * 32, SLOTS, 1000, 1, 512, "")
        self.catalog.attach(self.space)
        self.catalog.grown(self.catalog.grow(self.space.namespace))

    def ask(self, request: Request) -> int:
        self.clock.advance(request.at_s - self.clock.now_s())
        namespace, keys = self.space.namespace, list(map(key_of, request.chunks))
        found = self.catalog.lookup(namespace, keys)
        hit_count = next((i for i, hit in enumerate(found) if hit is None), len(keys))
        self.catalog.touch(namespace, keys[:hit_count])
        for index in range(hit_count, len(keys)):
            if self.catalog.lookup(namespace, [keys[index]]) == [None]:
                self._store(namespace, [ROOT, *keys], index)
        return hit_count

    def _store(self, namespace: bytes, keys: list[bytes], index: int) -> None:
        self.catalog.sweep([Want(namespace, 1)], can_grow=False)
        self.catalog.sweep()
        (slot,) = self.catalog.reserve(namespace, 1, 1.0)
        self.catalog.commit(namespace, [Commit(keys[index + 1], keys[index], index, slot, 0, 1)])


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seed", range(3))
def test_the_replay_is_what_a_catalog_would_do(policy, seed):
    real, fast = RealCache(policy), PrefixCache(SLOTS, policy)
    hits = []
    for request in random_requests(seed, 400):
        hits.append(real.ask(request))
        assert fast.ask(request) == hits[-1]
    snapshot = real.catalog.snapshot()
    assert snapshot.recalls[real.space.namespace] == tuple(fast.recall)
    assert {key: page.uses for (_, key), page in snapshot.pages.items()} == {
        key_of(chunk): page.uses for chunk, page in fast.pages.items()
    }
    assert sum(hits) > 100
    assert snapshot.pages


def test_nobody_beats_the_optimum_and_it_is_reached(tmp_path):
    path = tmp_path / "small_trace.jsonl"
    rows = [
        {
            "timestamp": 1000 * r.at_s,
            "input_length": 512 * len(r.chunks) + 7,
            "hash_ids": [*r.chunks],
        }
        for r in random_requests(4, 500)
    ]
    for row in rows:
        row["hash_ids"].append(-1)  # not full: not asked for
    path.write_text("\n".join(map(json.dumps, rows)))
    done = []
    result = bench_trace.measure([path], [30, 90], lambda: done.append(1))
    assert len(done) == bench_trace.pass_count(1, 2)
    for row in result["traces"]["small"]["capacities"]:
        assert max(row["hit_rate"].values()) == row["hit_rate"]["optimum"]
    title, lines = bench_trace.curves("small", result["traces"]["small"])
    assert "small" in title
    assert [x for x, _ in lines["optimum"]] == [30, 90]


def test_the_optimum_lets_pass_what_comes_too_late():
    requests = [Request(0.0, [chunk]) for chunk in (1, 2, 3, 1, 2, 3, 1)]
    assert trace_cache.optimum(requests, 1) == 2
    assert trace_cache.optimum(requests, 2) == 3
    assert trace_cache.optimum(requests, 3) == 4


@pytest.mark.skipif(not trace_peers.available(), reason="libcachesim is not installed")
def test_lru_is_that_of_libcachesim_where_prefixes_do_not_matter():
    chance = random.Random(1)
    requests = [Request(AGE_STEP_S * t, [chance.randrange(60)]) for t in range(2000)]
    assert trace_peers.replay(requests, 20, "LRU") == trace_cache.replay(requests, 20, Policy.LRU)
