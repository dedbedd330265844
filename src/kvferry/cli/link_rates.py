"""Reads in pieces beside reads of one piece: what cutting costs on a link.

    python -m kvferry.cli.link_rates

One line of JSON on standard output. Two agents of one process; pieces are in an order in which no
two are neighbours on both sides, so that NIXL cannot join them: the worst that a plan comes to. UCX
takes its transports from the environment when it is loaded, so `measure` runs a process for each.
"""

import ctypes
import json
import os
import subprocess
import sys
from array import array
from collections import defaultdict
from statistics import median
from typing import Any

from kvferry.clock import Clock, SystemClock
from kvferry.config import child_environment
from kvferry.errors import UnavailableError
from kvferry.transfer.base import Ending, PostEnded, Range, Stride

MEMORY_BYTES = 64 << 20
PIECE_BYTES = (MEMORY_BYTES, 1 << 20, 256 << 10, 64 << 10, 16 << 10)
"""The first one is what the others are compared to."""
ROUNDS = 15
READ_S = 60.0
TRANSPORTS = ("tcp", "tcp,sm")
PROCESS_S = 300.0


def measure() -> dict[str, Any]:
    """By transport: gigabytes per second by piece, and ratios to one piece."""
    return {transport: run_apart("kvferry.cli.link_rates", transport) for transport in TRANSPORTS}


def run_apart(module: str, transport: str) -> Any:
    """What this module prints in a process of its own, where UCX has only that transport."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=child_environment(UCX_TLS=transport, UCX_MODULES="^ib"),
        capture_output=True,
        timeout=PROCESS_S,
        check=False,
    )
    if done.returncode:
        raise UnavailableError("bench.link", f"{transport}: {done.stderr.decode()[-500:]}")
    return json.loads(done.stdout)


class Pair:
    """A reader, a peer, and their memory."""

    def __init__(self, clock: Clock):
        from kvferry.transfer.nixl_link import NixlLink  # noqa: PLC0415 - loads NIXL

        self._clock = clock
        self._reader, self._peer = NixlLink(clock, ("UCX",)), NixlLink(clock, ("UCX",))
        self._memory = [ctypes.create_string_buffer(MEMORY_BYTES) for _ in range(2)]
        self._tables: dict[int, list[int]] = {}
        self._name = ""

    def open(self) -> None:
        ranges = [Range(ctypes.addressof(memory), MEMORY_BYTES) for memory in self._memory]
        for link, memory in zip((self._reader, self._peer), ranges, strict=True):
            link.open()
            link.register(memory)
        self._name = self._reader.connect(self._peer.describe([ranges[1]]))
        for size in PIECE_BYTES:
            self._tables[size] = [
                self._reader.table(
                    owner, [Stride(memory.address, size, size, MEMORY_BYTES // size)]
                )
                for owner, memory in zip((None, self._name), ranges, strict=True)
            ]

    def read(self, piece_bytes: int) -> float:
        """All of the memory; bytes per second."""
        target, source = self._tables[piece_bytes]
        count = MEMORY_BYTES // piece_bytes
        apart = array("i", [*range(1, count, 2), *range(0, count, 2)])
        straight = array("i", range(count))
        started_s = self._clock.now_s()
        self._reader.post(self._name, target, straight, source, apart[::-1])
        while True:
            self._peer.poll()
            for event in self._reader.poll():
                if isinstance(event, PostEnded):
                    if event.ending is not Ending.DONE:
                        raise UnavailableError("bench.read", f"a read failed: {event.reason}")
                    return MEMORY_BYTES / (self._clock.now_s() - started_s)
            if self._clock.now_s() > started_s + READ_S:
                raise UnavailableError("bench.read", f"not read within {READ_S:.0f} s")

    def close(self) -> None:
        self._reader.close(READ_S)
        self._peer.close(READ_S)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pair, rates = Pair(SystemClock()), defaultdict(list)
    pair.open()
    for _ in range(ROUNDS + 1):  # the first one finds memory and connections cold
        for size in PIECE_BYTES:
            rates[size].append(pair.read(size))
    found = {size: median(values[1:]) for size, values in rates.items()}
    one = found[MEMORY_BYTES]
    print(
        json.dumps(
            {
                "gb_per_s": {f"{size >> 10} KiB": round(r / 1e9, 2) for size, r in found.items()},
                "ratios": {f"{size >> 10} KiB": round(r / one, 3) for size, r in found.items()},
            }
        ),
        file=replies,
        flush=True,
    )
    pair.close()


if __name__ == "__main__":
    main()
