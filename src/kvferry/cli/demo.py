"""`kvferry demo`: a second engine answers from the first one's KV cache.

Three engines, each in a process of its own, one after the other: A reads a document and answers a
question, B answers another question about it from the store, and B again without the store, for
comparison.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cli import demo_asking, options, output, smollm
from kvferry.cli.demo_asking import Told
from kvferry.clock import SystemClock
from kvferry.config import cache_folder

QUESTIONS = (
    "How many passengers does the Guillemot take?",
    "Who founded the line, and what did she buy?",
)
CHUNK_TOKENS = 64
RATIO_MAX = 0.25
STORE_WAIT_S = 2.0  # engine A goes idle before it ends, as a server would


def demo(
    as_json: options.AsJson = False,
    keep: Annotated[Path | None, typer.Option(help="Keep the store in this folder.")] = None,
) -> None:
    """Two engines share one KV cache: time to first token with and without. Exit code 1 if what
    the table claims does not hold."""
    console = output.open_console(stderr=as_json)
    model = smollm.model_folder(cache_folder())
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as scratch:
        store = keep or Path(scratch) / "store"
        engines = _run(console, model, store, Path(scratch))
    _, warm, plain = engines
    times = plain.first_token_s / warm.first_token_s
    title = "SmolLM2-135M reads a handbook; another engine answers from its KV cache"
    demo_asking.report(
        console,
        as_json,
        engines,
        _problems(engines),
        demo_asking.table(title, "tokens loaded", engines),
        f"Same answer, token by token; the first one {times:.1f} times sooner.",
    )


def _run(console: Console, model: Path, store: Path, scratch: Path) -> list[Told]:
    config = {
        "kv_connector": "FerryStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "pages": f"posix://{store}",
            "catalog": f"lmdb://{scratch}/catalog",
            "capacity_bytes": "1GiB",
            "chunk_tokens": CHUNK_TOKENS,
            "lookup_deadline_s": 10.0,  # a small machine is busy with the prompt
            "store_deadline_s": 120.0,
            "reservation_lease_s": 300.0,
        },
    }
    plan = [
        ("A, stores", QUESTIONS[0], config),
        ("B, from the store", QUESTIONS[1], config),
        ("B, without", QUESTIONS[1], None),
    ]
    engines = []
    for name, question, transfer in plan:
        with (
            console.status(f"engine {name}: starts in its own process and reads the handbook"),
            demo_asking.running(name, model, transfer, scratch / "engine.log") as engine,
        ):
            engines.append(engine.ask(demo_asking.prompt_of(question)))
            SystemClock().sleep(STORE_WAIT_S if transfer else 0.0)
    return engines


def _problems(engines: list[Told]) -> list[str]:
    """What does not hold of what the demo shows; empty if all does."""
    first, warm, plain = engines
    common = _common_tokens(first, warm)
    problems = []
    if first.loaded_tokens:
        problems.append(f"engine A loaded {first.loaded_tokens} tokens from an empty store")
    if warm.loaded_tokens != common:
        problems.append(f"engine B loaded {warm.loaded_tokens} tokens, expected {common}")
    if warm.token_ids != plain.token_ids:
        problems.append("engine B's answers with and without the store differ")
    if warm.first_token_s > RATIO_MAX * plain.first_token_s:
        problems.append(f"time to first token is not below {RATIO_MAX} of the time without")
    return problems


def _common_tokens(first: Told, warm: Told) -> int:
    """Tokens of the full chunks before the questions, where the prompts part."""
    pairs = zip(first.prompt_ids, warm.prompt_ids, strict=False)
    shared = next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
    return shared // CHUNK_TOKENS * CHUNK_TOKENS
