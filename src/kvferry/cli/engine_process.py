"""An engine in a process of its own, from the side that asks: one line of JSON for each call.

The other side is `engine_program`, or another program that serves as it does. What it prints, and
what it dies of, is in its log.
"""

import contextlib
import json
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.clock import Clock
from kvferry.config import child_environment
from kvferry.errors import UnavailableError

ANSWER_S = 300.0
"""For the longest call: the start of an engine on a machine where nothing is cached."""
END_S = 30.0
PROGRAM = "kvferry.cli.engine_program"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # vLLM's own file tier finds nothing of others otherwise
}
TAIL_BYTES = 4000
ERRORS_MAX = 3


class EngineProcess:
    """Starts with `start`; one thread. After an error of a call it is gone. `environment`: what is
    other than in `ENVIRONMENT`."""

    def __init__(
        self,
        log: Path,
        clock: Clock,
        answer_s: float = ANSWER_S,
        program: str = PROGRAM,
        environment: Mapping[str, str] | None = None,
    ):
        self._log = log
        self._clock = clock
        self._answer_s = answer_s
        self._program = program
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._input = b""

    def start(self) -> None:
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(**{**ENVIRONMENT, **self._environment}),
            )

    def call(self, operation: str, **arguments: Any) -> Any:
        """What `MeasuredEngine.operation` returns. Raises UnavailableError, with the reason, if
        the process died of it or does not answer."""
        self.send(operation, **arguments)
        return self.receive(operation)

    def send(self, operation: str, **arguments: Any) -> None:
        """The first half of `call`: `receive` has to follow."""
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
            process.stdin.flush()

    def receive(self, operation: str) -> Any:
        """The second half; errors as of `call`."""
        return json.loads(self._line(operation))

    def close(self) -> None:
        """Lets it end by itself, so that it removes what it has made. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def kill(self) -> None:
        """At once, in the middle of whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _line(self, operation: str) -> bytes:
        give_up_s = self._clock.now_s() + self._answer_s
        output = self._process.stdout
        while b"\n" not in self._input:
            left_s = give_up_s - self._clock.now_s()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
                self._process.kill()
                raise UnavailableError(
                    "bench.engine", f"no answer to {operation!r} within {self._answer_s:.0f} s"
                )
            received = output.read1(1 << 20)
            if not received:
                raise UnavailableError("bench.engine", cause(self._log))
            self._input += received
        line, _, self._input = self._input.partition(b"\n")
        return line


def cause(log: Path) -> str:
    """The last errors that a log names, or how it ends."""
    text = log.read_text(errors="replace")
    errors = re.findall(r"^(?:\S+ )*?((?:\w+\.)*\w*(?:Error|Exception): .+)$", text, re.M)
    if errors:  # what follows the first one may be its consequence, or the better message
        return "; ".join(dict.fromkeys(errors[-ERRORS_MAX:]))
    return f"the process is gone; its log ends:\n{text[-TAIL_BYTES:]}"
