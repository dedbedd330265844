"""What the demos share: a document, engines that are asked about it, and the report.

Everything that a demo claims is checked, and the exit code says so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvferry.cli import output
from kvferry.cli.engine_process import EngineProcess
from kvferry.clock import SystemClock
from kvferry.errors import InternalError, UnavailableError

ANSWER_TOKENS_MAX = 32
ENGINE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Told:
    """What one engine said. `transfer`: kv_transfer_params that it gave its client."""

    engine: str
    prompt_ids: list[int]
    loaded_tokens: int
    first_token_s: float
    token_ids: list[int]
    text: str
    transfer: dict[str, Any] | None


class Engine:
    """One in a process of its own, which `running` starts and ends. What it dies of is an
    InternalError."""

    def __init__(self, name: str, process: EngineProcess):
        self._name = name
        self._process = process
        self._is_opening = False

    def begin(self, model: Path, kv_transfer_config: Mapping[str, Any] | None) -> None:
        """It opens from now on, which takes half a minute."""
        self._process.send("open", model=str(model), kv_transfer_config=kv_transfer_config)
        self._is_opening = True

    def wait(self) -> None:
        """Until it is open."""
        if self._is_opening:
            self._is_opening = False
            self._receive("open")

    def ask(
        self,
        prompt: str | Sequence[int],
        answer_tokens_max: int = ANSWER_TOKENS_MAX,
        transfer: Mapping[str, Any] | None = None,
    ) -> Told:
        """`prompt`: of `prompt_of`, or tokens; `transfer`: kv_transfer_params that it carries."""
        self.wait()
        arguments = {"answer_tokens_max": answer_tokens_max, "transfer": transfer}
        self._process.send("ask", prompt=prompt, **arguments)
        return Told(engine=self._name, **self._receive("ask"))

    def sum_of(self, histogram: str) -> float:
        """Of all observations so far; 0 if it is not there."""
        self._process.send("sum_of", histogram=histogram)
        return self._receive("sum_of")

    def _receive(self, operation: str) -> Any:
        try:
            return self._process.receive(operation)
        except UnavailableError as error:
            message = f"engine {self._name} died: {error.message}"
            raise InternalError("demo.engine", message) from error


@contextmanager
def running(
    name: str,
    model: Path,
    kv_transfer_config: Mapping[str, Any] | None,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """An engine that opens by itself and can be asked; it is gone afterwards."""
    process = EngineProcess(
        log, SystemClock(), ENGINE_TIMEOUT_S, "kvferry.cli.demo_engine", environment
    )
    process.start()
    try:
        engine = Engine(name, process)
        engine.begin(model, kv_transfer_config)
        yield engine
    finally:
        process.close()


def report(
    console: Console,
    as_json: bool,
    engines: Sequence[Told],
    problems: Sequence[str],
    table: Table,
    success: str,
) -> None:
    """Prints it, and ends the command: exit code 1 if there are problems."""
    if as_json:
        told = [asdict(engine) for engine in engines]
        print(json.dumps({"engines": told, "problems": problems}))
    else:
        console.print(table)
        for problem in problems:
            console.print(f"[red]wrong:[/] {problem}")
        if not problems:
            console.print(f"[green]{success}[/]")
    raise typer.Exit(output.WRONG if problems else output.OK)


def table(title: str, loaded: str, engines: Sequence[Told]) -> Table:
    """`loaded`: what the column with the tokens from outside is called."""
    drawn = Table(title=title)
    for column in ("engine", "prompt tokens", loaded, "first token"):
        drawn.add_column(column, justify="left" if column == "engine" else "right")
    drawn.add_column("answer", min_width=30)
    for told in engines:
        first_token = f"{told.first_token_s:.2f} s"
        numbers = (str(len(told.prompt_ids)), str(told.loaded_tokens), first_token)
        drawn.add_row(told.engine, *numbers, told.text)
    return drawn


def prompt_of(question: str, line_count: int | None = None) -> str:
    """The document, or its first lines, and a question about it."""
    lines = files("kvferry.cli").joinpath("data/handbook.txt").read_text().splitlines()
    document = "\n".join(lines[:line_count])
    return f"<|im_start|>user\n{document}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
