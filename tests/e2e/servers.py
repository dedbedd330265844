"""vLLM's own API servers, on a CPU, as a test starts, asks, signals and inspects them."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.engine import ROOT, SECRET

PROGRAM = Path(__file__).with_name("server_program.py")
PATIENCE_S = 240.0
NICE = 10
SERVER_PORTS = (20_000, 30_000)
ARGUMENTS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--disable-uvicorn-access-log"),
    *("--block-size", "32", "--max-model-len", "2048", "--dtype", "float32"),
)
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "KVFERRY_TRANSFER_SECRET": SECRET,
    "UCX_TLS": "tcp,sm",
    "UCX_MODULES": "^ib",
    "PYTHONPATH": str(ROOT),
    "VLLM_NO_USAGE_STATS": "1",
    # Without a bound a CPU build of vLLM grows by some MiB with each new length of a prompt.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
}


@dataclass(frozen=True)
class Weight:
    """What the processes of one server take."""

    fds: int
    threads: int
    rss_bytes: int


class Server:
    """One server, at one port all its lives. Owned by one thread; any may ask."""

    def __init__(self, nursery: "Nursery", name: str, model: Path, port: int, *arguments: str):
        self.name, self.port = name, port
        self.environment: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{port}"
        self._nursery = nursery
        self._arguments = ["--model", str(model), "--port", str(port), *ARGUMENTS, *arguments]
        self._process_id = 0

    def start(self) -> None:
        self._process_id = self._nursery.fork(self._arguments, self.environment, self.name)

    def wait_until_healthy(self) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not self.is_healthy():
            assert time.monotonic() < give_up_s and self._processes(), self._nursery.tail(self.name)
            time.sleep(0.1)

    def terminate(self) -> None:
        """SIGTERM, as who runs servers ends them; returns when all its processes are gone."""
        os.kill(self._process_id, signal.SIGTERM)
        give_up_s = time.monotonic() + PATIENCE_S
        while self._processes():
            assert time.monotonic() < give_up_s, f"{self.name} does not end"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to all its processes. Idempotent."""
        while self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process_id, signal.SIGKILL)
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """By name, summed over labels; those with a reason or outcome also as "name:reason"."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as reply:
            return parse_metrics(reply.read().decode())

    def stop(self) -> None:
        """SIGSTOP to all its processes, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def give_way(self) -> None:
        """Who starts a server beside it gets the processor first."""
        for process_id in self._processes():
            for task in Path("/proc", str(process_id), "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(task.name), NICE)

    def weight(self) -> Weight:
        fds = threads = rss_bytes = 0
        for process_id in self._processes():
            folder = Path("/proc", str(process_id))
            fds += len(list((folder / "fd").iterdir()))
            status = (folder / "status").read_text()
            threads += int(re.search(r"Threads:\s+(\d+)", status)[1])
            rss_bytes += int(re.search(r"RssAnon:\s+(\d+)", status)[1]) << 10
        return Weight(fds, threads, rss_bytes)

    def _processes(self) -> list[int]:
        """Of its session, without those that only wait to be reaped."""
        if not self._process_id:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._process_id in (
                    int(entry.name),  # it has no session of its own yet
                    os.getsid(int(entry.name)),
                ):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(entry.name))
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as reply:
                return reply.status == 200
        except (OSError, urllib.error.HTTPError):
            return False


class Nursery:
    """Where servers come from. Ends them all."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._servers: list[Server] = []

    def __enter__(self) -> "Nursery":
        with (self._folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
        self._reply()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.kill()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def server(self, name: str, model: Path, *arguments: str) -> Server:
        """A server that is not started yet."""
        server = Server(self, name, model, free_port(), *arguments)
        self._servers.append(server)
        return server

    def fork(self, arguments: list[str], environment: dict[str, str], name: str) -> int:
        """Process and session id of a new server."""
        log = str(self._folder / f"{name}.log")
        call = {"arguments": arguments, "environment": environment, "log": log}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._reply()["pid"]

    def tail(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        assert line, self.tail("nursery")
        return json.loads(line)


def free_port() -> int:
    """One that stays free while its server is down: connections take theirs from further up."""
    while True:
        port = random.randrange(*SERVER_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def parse_metrics(page: str) -> dict[str, float]:
    """A page for Prometheus, as `Server.metrics` says."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", page, re.M):
        names = [name]
        kind = re.search(r'(?:reason|outcome)="(\w+)"', labels)
        if kind:
            names.append(f"{name}:{kind[1]}")
        for each in names:
            found[each] = found.get(each, 0.0) + float(value)
    return found


def post(url: str, body: Mapping[str, Any], patience_s: float = PATIENCE_S) -> bytes:
    """The whole answer of a completion. Raises HTTPError, or OSError without an answer in time."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=patience_s) as reply:
        return reply.read()


def events(stream: bytes) -> Iterator[dict[str, Any]]:
    """Of a stream, without its end."""
    for event in stream.decode().split("\n\n"):
        text = event.removeprefix("data: ")
        if text and text != "[DONE]":
            yield json.loads(text)
