"""The program of an engine's process: see `engine_process`.

Each line of standard input is a call: `operation`, a method of `MeasuredEngine` or, as "steps.run",
of `DecodeSteps`, and its arguments; each line of the reply is what it returns. Whatever vLLM prints
goes to standard error.
"""

import json
import os
import sys

from kvferry.clock import SystemClock


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Now, since importing vLLM may print.
    from kvferry.cli.decode_steps import DecodeSteps  # noqa: PLC0415
    from kvferry.cli.measured_engine import MeasuredEngine  # noqa: PLC0415

    clock = SystemClock()
    engine = MeasuredEngine(clock)
    steps = DecodeSteps(engine, clock)
    for line in sys.stdin:
        call = json.loads(line)
        owner, _, name = call.pop("operation").rpartition(".")
        reply = getattr(steps if owner == "steps" else engine, name)(**call)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    engine.close()


if __name__ == "__main__":
    main()
