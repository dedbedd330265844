"""Connectors that vLLM brings itself, asked the same prompts with the same settings.

    offloading_host        OffloadingConnector with its tier in host memory: one process
    offloading_files       the same with TieringOffloadingSpec and its file tier
    offloading_files_256   with 256 tokens in a file, not a block
    hf3fs                  HF3FSKVConnector with the stand-in client that it brings

A peer that does not start, dies or hangs has its error for a result; the others go on. What it
loads is counted, not demanded, and so are its answers that equal the engine's own hit.
"""

import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

from kvferry.cli import output
from kvferry.cli.bench_ttft import ANSWER_TOKENS, Answer, Bench, ask
from kvferry.cli.engine_process import EngineProcess, cause
from kvferry.clock import Clock
from kvferry.errors import ConfigError, UnavailableError

REST_S = 1.0
LAST_REST_S = 3.0
"""After each prompt that is stored, and after the last one: for what goes on behind."""
ANSWER_S = 120.0
SPARE_BYTES = 256 << 20
SERVER = "vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_metadata_server"
SERVER_PORT = 18_000
SERVER_S = 60.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Peer:
    """`extra`: its settings, from a folder of its own and the bytes it is to hold. `is_shared`: a
    fresh process finds what another one stored."""

    name: str
    connector: str
    is_shared: bool
    extra: Callable[[Path, int], Mapping[str, Any]]


def _files(folder: Path, content_bytes: int) -> dict[str, Any]:
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": content_bytes,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }


def _hf3fs(folder: Path, content_bytes: int) -> dict[str, Any]:
    return {"hf3fs_storage_path": str(folder), "hf3fs_file_size": content_bytes}


PEERS = (
    Peer("offloading_host", "OffloadingConnector", False, lambda _, n: {"cpu_bytes_to_use": n}),
    Peer("offloading_files", "OffloadingConnector", True, _files),
    Peer(
        "offloading_files_256",
        "OffloadingConnector",
        True,
        lambda folder, n: {**_files(folder, n), "block_size": 256},
    ),
    Peer("hf3fs", "HF3FSKVConnector", True, _hf3fs),
)


def chosen(words: str) -> list[Peer]:
    """Those whose names begin with one of the words. Raises ConfigError."""
    wanted = tuple(filter(None, words.split(",")))
    for word in wanted:
        if not any(peer.name.startswith(word) for peer in PEERS):
            names = ", ".join(peer.name for peer in PEERS)
            raise ConfigError("bench.peer", f"--against: {names}, and not {word!r}")
    return [peer for peer in PEERS if wanted and peer.name.startswith(wanted)]


class Contest:
    """Runs peers after `bench`, which knows the prompts and the right answers."""

    def __init__(self, bench: Bench, clock: Clock):
        self._bench = bench
        self._clock = clock

    def run(self, peers: Sequence[Peer]) -> dict[str, Any]:
        return {peer.name: self._run(peer) for peer in peers}

    def _run(self, peer: Peer) -> dict[str, Any]:
        folder = self._bench.plan.folder / peer.name
        folder.mkdir()
        engine_id = f"bench-{self._clock.random_bytes(8).hex()}"
        transfer = {
            "kv_connector": peer.connector,
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_connector_extra_config": peer.extra(folder, self._content_bytes()),
        }
        asked = _Asked(self._bench)
        result: dict[str, Any] = {"settings": transfer["kv_connector_extra_config"]}
        try:
            self._measure(peer, transfer, asked)
        except UnavailableError as error:
            result["failed"] = error.message
            output.complain(f"{peer.name} failed: {error.message}")
        finally:
            rmtree(folder)
            for left in SHARED_MEMORY.glob(f"*{engine_id}*"):
                left.unlink()
        return result | {"lengths": asked.rows()}

    def _content_bytes(self) -> int:
        """Room for all prompts and answers."""
        return self._bench.stored_bytes() * 9 // 8 + SPARE_BYTES

    def _measure(self, peer: Peer, transfer: Any, asked: "_Asked") -> None:
        bench = self._bench
        with _server(peer, bench.plan.folder / "server.log", self._clock):
            with bench.engines.opened(f"{peer.name} stores", transfer, ANSWER_S) as engine:
                bench.prompts.warm_up(engine)
                for token_count, prompt in bench.prompts.all():
                    asked.note("storing", token_count, ask(engine, prompt))
                    engine.call("rest", duration_s=REST_S)
                engine.call("rest", duration_s=LAST_REST_S)
                engine.call("reset")
                asked.all(engine, "loaded_same_process")
            if peer.is_shared:
                with bench.engines.opened(f"{peer.name} loads", transfer, ANSWER_S) as engine:
                    bench.prompts.warm_up(engine)
                    asked.all(engine, "loaded")


class _Asked:
    """What one peer answered."""

    def __init__(self, bench: Bench):
        self._bench = bench
        self._answers: dict[int, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
        self._same: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def note(self, case: str, token_count: int, answer: Answer) -> None:
        self._answers[token_count][case].append(answer)
        output.complain(f"{case}, {token_count} tokens: {answer['ms']:.1f} ms")

    def all(self, engine: EngineProcess, case: str) -> None:
        for own_hit, (token_count, prompt) in zip(
            self._bench.own_hits, self._bench.prompts.all(), strict=True
        ):
            self.note(case, token_count, ask(engine, prompt))
            longer = ask(engine, prompt, ANSWER_TOKENS)
            is_same = all(longer[what] == own_hit[what] for what in ("tokens", "logprobs"))
            self._same[token_count][case] += is_same

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "prompt_tokens": self._bench.prompts.length(token_count),
                "median_ms": {name: round(_median(found), 2) for name, found in cases.items()},
                "loaded_tokens": {name: _tokens(found) for name, found in cases.items()},
                "same_answers": dict(self._same[token_count]),
                "ratios_of_kvferry": self._ratios(token_count, cases),
            }
            for token_count, cases in self._answers.items()
        ]

    def _ratios(self, token_count: int, cases: Mapping[str, list[Answer]]) -> dict[str, float]:
        """kvferry's time, of the peer's."""
        own = self._bench.times_ms
        return {
            name: round(median(own[name][token_count]) / _median(found), 3)
            for name, found in cases.items()
            if own[name][token_count]
        }


def _median(answers: Sequence[Answer]) -> float:
    return median(answer["ms"] for answer in answers)


def _tokens(answers: Sequence[Answer]) -> list[int]:
    return [answer["cached_tokens"] for answer in answers]


@contextmanager
def _server(peer: Peer, log: Path, clock: Clock) -> Iterator[None]:
    """The metadata server that HF3FSKVConnector needs; nothing for the others."""
    if peer.name != "hf3fs":
        yield
        return
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER, "--host", "127.0.0.1", "--port", str(SERVER_PORT)],
            stdout=output,
            stderr=output,
        )
    try:
        _await(process, log, clock)
        yield
    finally:
        process.kill()
        process.wait()


def _await(process: "subprocess.Popen[bytes]", log: Path, clock: Clock) -> None:
    give_up_s = clock.now_s() + SERVER_S
    while clock.now_s() < give_up_s:
        if process.poll() is not None:
            raise UnavailableError("bench.server", f"its metadata server: {cause(log)}")
        try:
            socket.create_connection(("127.0.0.1", SERVER_PORT), 1.0).close()
        except OSError:
            clock.sleep(0.2)
        else:
            return
    raise UnavailableError("bench.server", "its metadata server does not answer")
