"""`kvferry bench trace`: what each policy of eviction makes of real requests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.catalog.base import DEFAULT_POLICY, Policy
from kvferry.cli import trace_cache, trace_peers
from kvferry.cli.trace_cache import Request
from kvferry.cli.ttft_plot import Series

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Capacities, of what a store would need that never evicts."""
OPTIMUM = "optimum"
RELATIVE_MIN = 0.99
"""The default's bar: of the best of libcachesim's LRU, ARC and S3-FIFO."""
NEAR_LRU, OPTIMUM_MIN = 0.75, 0.85
"""Where LRU reaches the first of the optimum, the default must reach the second."""
BAR_PEERS = ("LRU", "ARC", "S3-FIFO")


def contenders() -> dict[str, Callable[[Sequence[Request], int], int]]:
    """By name: how many hits a trace has with so many slots."""
    own = {
        f"kvferry {policy.value}": lambda requests, slots, policy=policy: trace_cache.replay(
            requests, slots, policy
        )
        for policy in Policy
    }
    peers = {
        name: lambda requests, slots, name=name: trace_peers.replay(requests, slots, name)
        for name in trace_peers.available()
    }
    return {OPTIMUM: trace_cache.optimum, **own, **peers}


def measure(
    paths: Sequence[Path], capacities: Sequence[int], on_done: Callable[[], None]
) -> dict[str, Any]:
    """`capacities`: in chunks; none: `SHARES`. `on_done`: called after each of `pass_count`."""
    traces = {
        path.stem.removesuffix("_trace"): _replay(path, capacities, on_done) for path in paths
    }
    rows = [row for trace in traces.values() for row in trace["capacities"]]
    result: dict[str, Any] = {"default": DEFAULT_POLICY.value, "traces": traces}
    if trace_peers.available():
        result["default_below_best_peer"] = sum(row["of_best_peer"] < RELATIVE_MIN for row in rows)
    near = [row for row in rows if row["lru_of_optimum"] >= NEAR_LRU]
    result["default_below_optimum_bar"] = sum(row["of_optimum"] < OPTIMUM_MIN for row in near)
    return result


def pass_count(path_count: int, capacity_count: int) -> int:
    return path_count * (capacity_count or len(SHARES)) * len(contenders())


def _replay(path: Path, capacities: Sequence[int], on_done: Callable[[], None]) -> dict[str, Any]:
    requests = trace_cache.read_trace(path)
    asked_count = sum(len(request.chunks) for request in requests)
    distinct_count = len({chunk for request in requests for chunk in request.chunks})
    rows = []
    for slots in capacities or [round(share * distinct_count) for share in SHARES]:
        rates = {}
        for name, run in contenders().items():
            rates[name] = round(run(requests, slots) / asked_count, 4)
            on_done()
        rows.append({"chunks": slots, "hit_rate": rates, **_standing(rates)})
    return {
        "requests": len(requests),
        "chunks_asked": asked_count,
        "chunks_distinct": distinct_count,
        "capacities": rows,
    }


def _standing(rates: dict[str, float]) -> dict[str, float]:
    default, lru = rates[f"kvferry {DEFAULT_POLICY.value}"], rates[f"kvferry {Policy.LRU.value}"]
    peers = [rates[name] for name in BAR_PEERS if name in rates]
    standing = {
        "of_optimum": round(default / rates[OPTIMUM], 4),
        "lru_of_optimum": round(lru / rates[OPTIMUM], 4),
    }
    return standing | ({"of_best_peer": round(default / max(peers), 4)} if peers else {})


def curves(name: str, trace: dict[str, Any]) -> tuple[str, Series]:
    """Title and lines of a plot: hit rate in percent over capacity in chunks."""
    rows = trace["capacities"]
    series = {
        contender: [(row["chunks"], 100 * row["hit_rate"][contender]) for row in rows]
        for contender in rows[0]["hit_rate"]
    }
    return f"{name}: prompt chunks found, in percent", series
