"""`kvferry bench`: measurements of this machine, side by side, as medians and ratios."""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

import kvferry
from kvferry.cli import options, output
from kvferry.clock import Clock, SystemClock
from kvferry.config import cache_folder
from kvferry.setting_values import parse_size

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.command()
def io(
    folder: options.Scratch = None,
    block: Annotated[str, typer.Option(help="Payload of one slice.")] = "1MiB",
    slices: Annotated[int, typer.Option(min=1, help="Slices in an extent: what is one I/O.")] = 8,
    size: Annotated[str, typer.Option(help="Length of the file.")] = "1GiB",
    depth: Annotated[int, typer.Option(min=1, max=64, help="Blocks at a time.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each contender.")] = 5,
    buffered: Annotated[bool, typer.Option("--buffered", help="Through the page cache.")] = False,
    nixl_program: Annotated[
        Path | None, typer.Option(help="benchmarks/nixl_posix.py, to have NIXL take part.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """kvferry's I/O against fio's engines, on one file."""
    from kvferry.cli import bench_io  # noqa: PLC0415 - needs the native extension

    clock = SystemClock()
    block_bytes = parse_size("--block", block)
    contenders, skipped = bench_io.available(clock, nixl_program)
    with TemporaryDirectory(dir=folder) as scratch, output.progress() as progress:
        plan = bench_io.Plan(
            Path(scratch, "bench"),
            block_bytes,
            max(depth, parse_size("--size", size) // (block_bytes * slices)),
            depth,
            not buffered,
            rounds,
            slices,
        )
        task = progress.add_task("passes", total=rounds * 2 * len(contenders))
        result = bench_io.measure(plan, contenders, lambda: progress.advance(task))
    show({**machine(clock), "left_out": skipped, **result}, as_json=as_json)


@app.command()
def usrbio(
    folder: Annotated[Path, typer.Argument(help="On a mounted 3FS.")],
    library: Annotated[str, typer.Option("--usrbio-library", help="libhf3fs_api_shared.so.")],
    loop: Annotated[Path, typer.Option(help="benchmarks/usrbio_loop.c, compiled.")],
    block: Annotated[str, typer.Option(help="Payload of a page, one I/O.")] = "4MiB",
    size: Annotated[str, typer.Option(help="Length of the file.")] = "1GiB",
    depth: Annotated[int, typer.Option(min=1, max=64, help="Rings, of four blocks each.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each contender.")] = 5,
    as_json: options.AsJson = False,
) -> None:
    """kvferry's I/O on 3FS against a bare loop over the calls of its library."""
    from kvferry.cli import bench_usrbio  # noqa: PLC0415 - needs the native extension

    clock, page_bytes = SystemClock(), parse_size("--block", block)
    with TemporaryDirectory(dir=folder) as scratch, output.progress() as progress:
        block_count = max(depth, parse_size("--size", size) // page_bytes)
        plan = bench_usrbio.plan(Path(scratch), page_bytes, block_count, depth, rounds)
        task = progress.add_task("passes", total=rounds * 2 * bench_usrbio.CONTENDER_COUNT)
        result = bench_usrbio.measure(plan, clock, library, loop, lambda: progress.advance(task))
    show({**machine(clock), **result}, as_json=as_json)


@app.command()
def copies(
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each contender.")] = 25,
    as_json: options.AsJson = False,
) -> None:
    """Gather and scatter against memcpy."""
    from kvferry.cli import bench_copies  # noqa: PLC0415 - needs the native extension

    clock = SystemClock()
    show({**machine(clock), "copies": bench_copies.measure(clock, rounds)}, as_json=as_json)


@app.command()
def device(
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each contender.")] = 15,
    as_json: options.AsJson = False,
) -> None:
    """Gather and scatter of GPU memory against plain copies. Needs an NVIDIA GPU."""
    from kvferry.cli import bench_device  # noqa: PLC0415 - needs torch and triton
    from kvferry.device.gpu import Cuda, first_gpu  # noqa: PLC0415 - as well

    clock, gpu = SystemClock(), first_gpu()
    rows = bench_device.measure(clock, Cuda(gpu), rounds)
    show({**machine(clock), "gpu": Cuda(gpu).name, "device": rows}, as_json=as_json)


@app.command()
def catalog(
    folder: options.Scratch = None,
    pages: Annotated[int, typer.Option(min=1, help="Pages in the catalog.")] = 200_000,
    rounds: Annotated[int, typer.Option(min=2, help="Calls of each kind.")] = 50,
    valkey: Annotated[
        bool, typer.Option("--valkey", help="On a Valkey server, started for this.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """A catalog, embedded or on Valkey: lookups, stores and touches, alone and crowded."""
    from kvferry.cli import bench_catalog  # noqa: PLC0415 - as its siblings

    run = bench_catalog.run_on_server if valkey else bench_catalog.run
    with TemporaryDirectory(dir=folder) as scratch:
        result = run(Path(scratch), pages, rounds)
    show({**machine(SystemClock()), **result}, as_json=as_json)


@app.command()
def scheduler(
    folder: options.Scratch = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 256,
    steps: Annotated[int, typer.Option(min=100, help="Steps to measure.")] = 1000,
    as_json: options.AsJson = False,
) -> None:
    """What kvferry costs on the thread of vLLM's scheduler."""
    from kvferry.cli import bench_scheduler  # noqa: PLC0415 - needs the native extension

    with TemporaryDirectory(dir=folder) as scratch:
        result = bench_scheduler.run(Path(scratch), requests, steps)
    show({**machine(SystemClock()), **result}, as_json=as_json)


@app.command()
def engine(
    folder: options.Scratch = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all engines.")] = 14,
    as_json: options.AsJson = False,
) -> None:
    """What storing costs a real engine, and what loading saves it. Needs vLLM and the demo's
    model; numbers mean something only on a machine that does nothing else."""
    from kvferry.cli import bench_engine, smollm  # noqa: PLC0415 - as its siblings

    clock = SystemClock()
    model = smollm.model_folder(cache_folder())
    with TemporaryDirectory(dir=folder) as scratch, output.progress() as progress:
        task = progress.add_task("rounds", total=1 + 5 * rounds)
        bench = bench_engine.Bench(Path(scratch), model, clock)
        result = bench.run(rounds, lambda: progress.advance(task))
    load = [round(minutes, 2) for minutes in os.getloadavg()]
    show({**machine(clock), "load_average": load, **result}, as_json=as_json)


@app.command()
def ttft(
    folder: options.Scratch = None,
    shape: options.Shape = "8b",
    lengths: options.Lengths = "1000,5000,20000",
    prompts: options.Prompts = 3,
    mode: options.Mode = "eager",
    dummy: Annotated[bool, typer.Option("--dummy", help="vLLM's dummy weights.")] = False,
    settings: options.Settings = "{}",
    ferry: options.Ferry = "{}",
    against: Annotated[
        str, typer.Option(help="Peers that vLLM brings: offloading, hf3fs, or a longer name.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Where to draw it, as SVG.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time to first token of a real engine: cold, its own prefix hit, loaded from the store in a
    fresh process. Needs vLLM, and no model. Exit code 1 if something was not loaded, or if an
    answer is not the one of the engine's own hit."""
    from kvferry.cli import bench_peers, bench_ttft, ttft_plot  # noqa: PLC0415 - as its siblings
    from kvferry.cli.engine_runs import parse_plan  # noqa: PLC0415 - as well

    clock = SystemClock()
    with TemporaryDirectory(dir=folder) as scratch:
        plan = parse_plan(scratch, shape, lengths, prompts, mode, settings, ferry)
        plan = replace(plan, is_seeded=not dummy)
        peers = bench_peers.chosen(against)
        ttft_bench = bench_ttft.Bench(plan, clock)
        result = ttft_bench.run()
        result["peers"] = bench_peers.Contest(ttft_bench, clock).run(peers)
    if plot:
        plot.write_text(ttft_plot.svg(*bench_ttft.curves(result)))
    show({**machine(clock), **result}, as_json=as_json)
    raise typer.Exit(output.WRONG if result["wrong"] else output.OK)


@app.command()
def interference(
    folder: options.Scratch = None,
    shape: options.Shape = "8b",
    lengths: options.Lengths = "10000,5000",
    mode: options.Mode = "graphs",
    parts: Annotated[str, typer.Option(help="Of prefill, decode, profile, slow.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Of each measurement.")] = 3,
    arrivals: Annotated[int, typer.Option(min=1, help="Prompts that come while others run.")] = 2,
    steps: Annotated[int, typer.Option(min=8, help="Of a phase without arrivals.")] = 100,
    settings: options.Settings = "{}",
    ferry: options.Ferry = "{}",
    as_json: options.AsJson = False,
) -> None:
    """What loads and stores cost a real engine: prefill, 32 requests that decode, blocking calls,
    and a store slower than computing. Two lengths: the second for the slow store. Needs vLLM, and
    no model; two engines share the device. Exit code 1 if what was to be measured did not happen,
    or if kvferry blocked the engine's thread."""
    from kvferry.cli import bench_interference  # noqa: PLC0415 - as its siblings
    from kvferry.cli.engine_runs import parse_plan  # noqa: PLC0415 - as well

    clock = SystemClock()
    load = bench_interference.Load(rounds, arrivals, steps)
    wanted = bench_interference.chosen(parts)
    with TemporaryDirectory(dir=folder) as scratch:
        plan = parse_plan(scratch, shape, lengths, 1, mode, settings, ferry)
        result = bench_interference.Bench(plan, load, clock).run(wanted)
    show({**machine(clock), **result}, as_json=as_json)
    raise typer.Exit(output.WRONG if result["wrong"] else output.OK)


@app.command()
def transfer(
    folder: options.Scratch = None,
    lengths: options.Lengths = "250,1000,2000",
    prompts: options.Prompts = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of both connectors.")] = 2,
    as_json: options.AsJson = False,
) -> None:
    """Time to first token of what another engine has prefilled, beside vLLM's NixlConnector, and
    reads in pieces beside reads of one piece. Needs vLLM, NIXL and the demo's model. Exit code 1
    if something was not handed over, or if the two connectors' answers differ."""
    from kvferry.cli import (  # noqa: PLC0415 - as its siblings
        bench_transfer,
        link_rates,
        load_rates,
        smollm,
    )
    from kvferry.cli.engine_runs import parse_lengths  # noqa: PLC0415 - as well

    clock, token_counts = SystemClock(), parse_lengths(lengths)
    rates = {"links": link_rates.measure(), "loads": load_rates.measure()}
    model = smollm.model_folder(cache_folder())
    with TemporaryDirectory(dir=folder) as scratch:
        bench = bench_transfer.Bench(Path(scratch), model, clock, token_counts, prompts)
        result = bench.run(rounds)
    load = [round(minutes, 2) for minutes in os.getloadavg()]
    show({**machine(clock), "load_average": load, **rates, **result}, as_json=as_json)
    raise typer.Exit(output.WRONG if result["wrong"] else output.OK)


@app.command()
def trace(
    files: Annotated[
        list[Path], typer.Argument(help="Traces of the Mooncake project, JSON lines.")
    ],
    capacity: Annotated[
        list[int] | None, typer.Option(help="Chunks that fit; may be repeated. Default: by trace.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for an SVG of each trace.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Hit rates of the policies of eviction on recorded requests, beside the optimum and, where it
    is installed, libcachesim. A chunk counts as found if all before it in its prompt are too."""
    from kvferry.cli import bench_trace, ttft_plot  # noqa: PLC0415 - as its siblings

    capacities = capacity or []
    with output.progress() as progress:
        pass_count = bench_trace.pass_count(len(files), len(capacities))
        task = progress.add_task("replays", total=pass_count)
        result = bench_trace.measure(files, capacities, lambda: progress.advance(task))
    for name, replayed in result["traces"].items() if plots else ():
        drawn = ttft_plot.svg(*bench_trace.curves(name, replayed), "capacity in chunks", "%")
        Path(plots, f"eviction-{name}.svg").write_text(drawn)
    show({**machine(SystemClock()), **result}, as_json=as_json)


def machine(clock: Clock) -> dict[str, Any]:
    """What any number needs beside it: where and when it was measured."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": " ".join(["kvferry", *sys.argv[1:]]),
        "date": datetime.fromtimestamp(clock.wall_s(), UTC).isoformat(timespec="minutes"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory_bytes >> 30,
        "architecture": platform.machine(),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "kvferry": kvferry.__version__,
    }


def show(result: Mapping[str, Any], *, as_json: bool) -> None:
    """A table, or JSON."""
    if as_json:
        output.print_json(result)
    else:
        output.print_table(("what", "value"), list(lines(result)))


def lines(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Values as text; the innermost ones of one name on one line."""
    found = []
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            found += lines({str(index): row for index, row in enumerate(value)}, f"{prefix}{name} ")
        elif not isinstance(value, Mapping):
            found.append((prefix + name, str(value)))
        elif any(isinstance(inner, Mapping) for inner in value.values()):
            found += lines(value, f"{prefix}{name}: ")
        else:
            texts = (f"{inner} {number}" for inner, number in value.items())
            found.append((prefix + name, ", ".join(texts)))
    return found
