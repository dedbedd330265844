"""A real vLLM engine in a process of its own, driven by one JSON line per call.

The other side is `program.py`. One process opens
and closes several engines one after another (importing vLLM takes ten times as long as opening a
tiny model), and can be killed with -9 at any moment. By default the engine runs inside that
process; `multiprocessing=True` lets vLLM start its own core process as a server does.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SECRET = "a secret of the tests"


class EngineError(RuntimeError):
    """What the engine's process said instead of an answer."""


@dataclass(frozen=True)
class Answer:
    """One request's result. `cached_tokens`: what vLLM did not compute, local and external.
    `siblings`: the other answers of one request. `transfer`: its kv_transfer_params."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    siblings: tuple[tuple[int, ...], ...] = ()
    transfer: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answers:
    """One `generate` call. Counters are vLLM's own, counted over this call."""

    requests: tuple[Answer, ...]
    external_hit_tokens: int
    external_query_tokens: int
    local_hit_tokens: int
    preemptions: int
    duration_s: float

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(answer.tokens for answer in self.requests)

    @property
    def logprobs(self) -> tuple[tuple[float, ...], ...]:
        return tuple(answer.logprobs for answer in self.requests)


def connector(**extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an engine with the offload connector."""
    return {
        "kv_connector": "FerryStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class EngineProcess:
    """Starts at `start`, ends at `stop` or `kill`. Owned by one test thread. `before`: words that
    stand before its command."""

    def __init__(self, log: Path, *, multiprocessing: bool = False, before: Sequence[str] = ()):
        self._log = log
        self._before = before
        self._multiprocessing = multiprocessing
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "EngineProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        environment = dict(os.environ) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if self._multiprocessing else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "KVFERRY_TRANSFER_SECRET": SECRET,
            "UCX_TLS": "tcp,sm",
            "UCX_MODULES": "^ib",
            "PYTHONPATH": str(ROOT),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._before, sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def open(self, model: Path, **settings: Any) -> float:
        """Opens an engine with these `LLM` arguments; returns the seconds that it took."""
        return self._call("open", model=str(model), settings=settings)["duration_s"]

    def close(self) -> None:
        """Shuts the engine down; the process stays."""
        self._call("close")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 8,
        salts: Sequence[str | None] = (),
        loras: Sequence[str | None] = (),
        transfers: Sequence[Any] = (),
        **sampling: Any,
    ) -> Answers:
        """Runs all prompts as one batch, greedily. `loras`: adapter folders; `transfers`:
        kv_transfer_params."""
        reply = self._call(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            sampling={"max_tokens": max_tokens, **sampling},
            salts=list(salts),
            loras=list(loras),
            transfers=list(transfers),
        )
        return _answers(reply)

    def generate_and_abort(
        self,
        prompts: Sequence[Sequence[int]],
        tokens_until_abort: Sequence[int | None],
        *,
        max_tokens: int = 8,
        transfers: Sequence[Any] = (),
        **sampling: Any,
    ) -> Answers:
        """As `generate`; a request with a limit is aborted when it has so many tokens, with limit
        0 after the first step."""
        reply = self._call(
            "generate_and_abort",
            prompts=[list(prompt) for prompt in prompts],
            sampling={"max_tokens": max_tokens, **sampling},
            tokens_until_abort=list(tokens_until_abort),
            transfers=list(transfers),
        )
        return _answers(reply)

    def inject(self, fault: str, **arguments: Any) -> None:
        """Changes the process by a function of `injected.py`, until `restore`: before `open`."""
        self._call("inject", fault=fault, arguments=arguments)

    def restore(self) -> None:
        """Takes back all that was injected."""
        self._call("restore")

    def emulate(self, library: Path, settings: dict[str, float] | None = None) -> dict[str, int]:
        """Sets up the emulated 3FS that this process has loaded (None: leaves it as it is); how
        often each fault has fired there."""
        return self._call("emulate", library=str(library), settings=settings)["counts"]

    def facts(self) -> dict[str, Any]:
        """What the engine made of its settings."""
        return self._call("facts")

    def metrics(self) -> dict[str, float]:
        """All counters and gauges of the engine, summed over labels, by name; those with a reason
        or an outcome also as "name:reason"."""
        return self._call("metrics")["metrics"]

    def slow_pages(self, late_s: float) -> None:
        """From now on each read and write takes up to `late_s` longer. Nothing is under way."""
        self._call("pages", how="slow", late_s=late_s)

    def hang_pages(self) -> None:
        """The page store stops, for both halves. Nothing is under way."""
        self._call("pages", how="hang", late_s=0.0)

    def release_pages(self) -> None:
        self._call("pages", how="release", late_s=0.0)

    def hang_catalog(self) -> None:
        """No call of the catalog returns any more. In-process engines only."""
        self._call("catalog", how="hang")

    def release_catalog(self) -> None:
        self._call("catalog", how="release")

    def break_catalog_opening(self, how: str) -> None:
        """The next engines of this process find the catalog "down" or "stuck"."""
        self._call("catalog_opening", how=how)

    def mend_catalog_opening(self) -> int:
        """How often it was tried to open the catalog in vain."""
        return self._call("catalog_opening", how="works")["attempt_count"]

    def state(self) -> dict[str, int]:
        """What is under way: `inside.Worker.ferry_state`, and for in-process engines
        `inside.scheduler_state`."""
        return self._call("state")["state"]

    def abort(
        self,
        prompt: Sequence[int],
        when: str,
        step_count_max: int = 1000,
        transfer: Any = None,
    ) -> dict[str, int]:
        """Sends a request and aborts it when `state()[when]` is not 0; returns that state."""
        return self._call(
            "abort",
            prompt=list(prompt),
            when=when,
            step_count_max=step_count_max,
            transfer=transfer,
        )["state"]

    @property
    def group(self) -> int:
        """Of the process and of all that it started."""
        return self._process.pid

    def stop(self) -> None:
        """SIGSTOP to the process and to all that it started, until `go_on`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def wait_for_rest(self) -> dict[str, int]:
        """Returns the state when nothing is under way but slots held ready."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            state = self.state()
            if not any(count for name, count in state.items() if name != "slots"):
                return state
            assert time.monotonic() < give_up_s, f"never at rest: {state}"
            time.sleep(0.05)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        return self._call("reset", reset_connector=reset_connector)["done"]

    def kill(self) -> None:
        """SIGKILL to the process and to all that it started. Idempotent."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"operation": operation, **arguments}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-4000:]
            raise EngineError(f"the engine's process is gone; its log ends with:\n{tail}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply


def _answers(reply: dict[str, Any]) -> Answers:
    requests = tuple(
        Answer(
            tuple(item["tokens"]),
            tuple(item["logprobs"]),
            item["cached_tokens"],
            tuple(tuple(sibling) for sibling in item.get("siblings", ())),
            item.get("transfer"),
        )
        for item in reply.pop("requests")
    )
    return Answers(requests, **reply)
