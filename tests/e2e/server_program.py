"""Forks vLLM's API servers: one import of vLLM for all of them. The other side is `servers.py`.

Each line of standard input is a server to start: `arguments` of its command line, what its
`environment` has beside ours, and its `log`. The reply is its process id. Ends with standard input,
and ends what is left of the servers.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from typing import Any

from vllm.entrypoints.launchers.api_server import entry


def fork_only() -> None:
    """A CPU build of vLLM spawns the processes of an engine, and each imports everything again."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")


def serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """In the new process: until it is ended."""
    os.setsid()
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["api_server", *arguments]
    entry.main()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    fork_only()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to reap them
    print(json.dumps({"ready": True}), file=replies, flush=True)
    started: list[int] = []
    for line in iter(sys.stdin.readline, ""):
        call: dict[str, Any] = json.loads(line)
        process_id = os.fork()
        if not process_id:
            replies.close()
            serve(**call)
            sys.exit()
        started.append(process_id)
        print(json.dumps({"pid": process_id}), file=replies, flush=True)
    for process_id in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_id, signal.SIGKILL)


if __name__ == "__main__":
    main()
