"""The program of an engine's process: see `engine_process`.

Each line of standard input is a call: `operation`, a method of `MeasuredEngine` or, as "steps.run",
of `DecodeSteps`, and its arguments; each line of the reply is what it returns. Whatever vLLM prints
goes to standard error.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.clock import SystemClock


def serve(make: Callable[[], Mapping[str, Any]]) -> None:
    """Answers calls until standard input ends, then closes the engine. `make`: objects by the name
    that stands before the dot; that of the engine is "". It may print."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    objects = make()
    for line in sys.stdin:
        call = json.loads(line)
        owner, _, name = call.pop("operation").rpartition(".")
        replies.write(json.dumps(getattr(objects[owner], name)(**call)) + "\n")
        replies.flush()
    objects[""].close()


def _make() -> Mapping[str, Any]:
    # Now, since importing vLLM may print.
    from kvferry.cli.decode_steps import DecodeSteps  # noqa: PLC0415
    from kvferry.cli.measured_engine import MeasuredEngine  # noqa: PLC0415

    clock = SystemClock()
    engine = MeasuredEngine(clock)
    return {"": engine, "steps": DecodeSteps(engine, clock)}


if __name__ == "__main__":
    serve(_make)
