"""`kvferry pd demo`: a prompt is computed in one engine and answered by another.

Three engines: one alone, for comparison; then a producer, which reads a document, and beside it a
consumer, which gets the KV cache over NIXL and answers. What carries the parameters from one to the
other is this command; in front of servers a router does.
"""

import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvferry.cli import demo_asking, options, output, smollm
from kvferry.cli.demo_asking import Told
from kvferry.clock import Clock, SystemClock
from kvferry.config import SECRET_VARIABLE, cache_folder

QUESTION = "How many passengers does the Guillemot take?"
LINES = 30
"""Of the document: three engines read it, on a small machine."""
SECRET_BYTES = 32
UNHURRIED = {
    "claim_deadline_s": 30.0,
    "dial_timeout_s": 30.0,
    "read_deadline_s": 120.0,
    "lease_s": 120.0,
}
"""A small machine is busy with all three engines."""
ONE_MACHINE = {"UCX_TLS": "tcp,sm", "UCX_MODULES": "^ib"}
"""See docs/operations.md."""
AS_A_SERVER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""vLLM's core steps by itself, in a process of its own: a producer has to, after its answer; the
others do likewise, so that their times can be compared."""

app = typer.Typer(help="Prefill here, decode there.", no_args_is_help=True)


@app.command()
def demo(as_json: options.AsJson = False) -> None:
    """A producer computes a prompt, a consumer answers from its KV cache. Exit code 1 if the answer
    is not that of an engine alone, or the tokens did not come from the producer."""
    console = output.open_console(stderr=as_json)
    model = smollm.model_folder(cache_folder())
    with tempfile.TemporaryDirectory(prefix="kvferry-pd-demo-") as scratch:
        engines = _run(console, model, Path(scratch), SystemClock())
    _, producer, consumer = engines
    title = "SmolLM2-135M reads a handbook in one engine; another one answers"
    moved = f"{consumer.loaded_tokens} of {len(producer.prompt_ids)} prompt tokens"
    demo_asking.report(
        console,
        as_json,
        engines,
        problems(*engines),
        demo_asking.table(title, "from the producer", engines),
        f"Same answer, token by token; {moved} came from the producer.",
    )


def _run(console: Console, model: Path, scratch: Path, clock: Clock) -> list[Told]:
    prompt = demo_asking.prompt_of(QUESTION, LINES)
    with (
        console.status("an engine alone: starts in its own process and reads the handbook"),
        demo_asking.running("alone", model, None, scratch / "alone.log", AS_A_SERVER) as alone,
    ):
        plain = alone.ask(prompt)
    environment = {SECRET_VARIABLE: clock.random_bytes(SECRET_BYTES).hex()}
    environment |= ONE_MACHINE | AS_A_SERVER
    with (
        console.status("producer and consumer: start, and hand over the handbook"),
        demo_asking.running(
            "producer", model, _config("kv_producer"), scratch / "producer.log", environment
        ) as producer,
        demo_asking.running(
            "consumer", model, _config("kv_consumer"), scratch / "consumer.log", environment
        ) as consumer,
    ):
        consumer.wait()
        prefilled = producer.ask(prompt, 1, {"do_remote_decode": True})
        answered = consumer.ask(prompt, transfer=prefilled.transfer)
    return [plain, prefilled, answered]


def _config(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "FerryTransferConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": UNHURRIED,
    }


def problems(plain: Told, producer: Told, consumer: Told) -> list[str]:
    """What does not hold of what the demo shows; empty if all does. The last token of a prompt is
    always computed where the answer is."""
    expected = len(plain.prompt_ids) - 1
    found = []
    if producer.transfer is None:
        found.append("the producer offers nothing")
    if producer.loaded_tokens or producer.token_ids != plain.token_ids[:1]:
        found.append("the producer did not compute the prompt as an engine alone does")
    if consumer.loaded_tokens != expected:
        found.append(
            f"the consumer got {consumer.loaded_tokens} tokens from outside, expected {expected}"
        )
    if consumer.token_ids != plain.token_ids:
        found.append("the consumer's answer is not that of an engine alone")
    return found
