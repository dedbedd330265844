"""`kvferry demo`: a second engine answers from the first one's KV cache.

Three engines, each in a process of its own, one after the other: A reads a document and answers a
question, B answers another question about it from the store, and B again without the store, for
comparison. Everything that is claimed is checked, and the exit code says so.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvferry.cli import output, smollm
from kvferry.config import cache_folder, child_environment
from kvferry.errors import InternalError

QUESTIONS = (
    "How many passengers does the Guillemot take?",
    "Who founded the line, and what did she buy?",
)
CHUNK_TOKENS = 64
RATIO_MAX = 0.25
ENGINE_TIMEOUT_S = 600
STORE_WAIT_S = 2.0  # engine A goes idle before it ends, as a server would


@dataclass(frozen=True)
class Told:
    """What one engine said."""

    engine: str
    prompt_ids: list[int]
    loaded_tokens: int
    first_token_s: float
    token_ids: list[int]
    text: str


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep the store in this folder.")] = None,
) -> None:
    """Two engines share one KV cache: time to first token with and without. Exit code 1 if what
    the table claims does not hold."""
    console = output.open_console(stderr=as_json)
    model = smollm.model_folder(cache_folder())
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as scratch:
        store = keep or Path(scratch) / "store"
        engines = _run(console, model, store, Path(scratch))
    problems = _problems(engines)
    if as_json:
        print(json.dumps({"engines": [asdict(told) for told in engines], "problems": problems}))
    else:
        console.print(_table(engines))
        _print_verdict(console, engines, problems)
    raise typer.Exit(1 if problems else 0)


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
        with console.status(f"engine {name}: starts in its own process and reads the handbook"):
            engines.append(_ask(name, model, question, transfer, scratch))
    return engines


def _ask(name: str, model: Path, question: str, transfer: Any, scratch: Path) -> Told:
    handbook = files("kvferry.cli").joinpath("data/handbook.txt").read_text()
    job = {
        "model": str(model),
        "prompt": _prompt(handbook, question),
        "kv_transfer_config": transfer,
        "wait_s": STORE_WAIT_S if transfer else 0,
    }
    log = scratch / "engine.log"
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.cli.demo_engine"],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=ENGINE_TIMEOUT_S,
            check=False,
            env=child_environment(
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                VLLM_CPU_KVCACHE_SPACE="1",
                VLLM_LOGGING_LEVEL="WARNING",
                VLLM_NO_USAGE_STATS="1",
                HF_HUB_OFFLINE="1",
            ),
        )
    if done.returncode or not done.stdout:
        raise InternalError("demo.engine", f"engine {name} died:\n{log.read_text()[-3000:]}")
    return Told(engine=name, **json.loads(done.stdout))


def _prompt(handbook: str, question: str) -> str:
    return f"<|im_start|>user\n{handbook}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


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


def _table(engines: list[Told]) -> Table:
    table = Table(title="SmolLM2-135M reads a handbook; another engine answers from its KV cache")
    for title in ("engine", "prompt tokens", "tokens loaded", "first token"):
        table.add_column(title, justify="left" if title == "engine" else "right")
    table.add_column("answer", min_width=30)
    for told in engines:
        first_token = f"{told.first_token_s:.2f} s"
        numbers = (str(len(told.prompt_ids)), str(told.loaded_tokens), first_token)
        table.add_row(told.engine, *numbers, told.text)
    return table


def _print_verdict(console: Console, engines: list[Told], problems: list[str]) -> None:
    _, warm, plain = engines
    for problem in problems:
        console.print(f"[red]wrong:[/] {problem}")
    if not problems:
        times = plain.first_token_s / warm.first_token_s
        console.print(
            f"[green]Same answer, token by token; the first one {times:.1f} times sooner.[/]"
        )
