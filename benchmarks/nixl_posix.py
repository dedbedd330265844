"""One pass of NIXL's POSIX backend over a file: a contender of `kvferry bench io`.

    python benchmarks/nixl_posix.py read|write FILE BLOCK_BYTES BLOCK_COUNT DEPTH DIRECT

Two transfers of DEPTH blocks each take turns, so that between one and two times DEPTH blocks are
in flight. Prints JSON: elapsed_s, cpu_s. Needs nixl (pip install nixl-cu12).
"""

import ctypes
import json
import mmap
import os
import resource
import sys
import time

from nixl_cu12._api import nixl_agent, nixl_agent_config

AGENT = "bench"


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(verb: str, path: str, block_bytes: int, block_count: int, depth: int, direct: bool):
    agent = nixl_agent(AGENT, nixl_agent_config(backends=[]))
    agent.create_backend("POSIX")
    descriptor = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = mmap.mmap(-1, 2 * depth * block_bytes, flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent.register_memory([(address, len(memory), 0, "m")], "DRAM", backends=["POSIX"])
    file_bytes = block_count * block_bytes
    agent.register_memory([(0, file_bytes, descriptor, "f")], "FILE", backends=["POSIX"])

    def begin(first: int, turn: int):
        blocks = range(first, min(first + depth, block_count))
        places = [address + (turn * depth + i) * block_bytes for i in range(len(blocks))]
        local = agent.get_xfer_descs([(place, block_bytes, 0) for place in places], "DRAM")
        remote = [(block * block_bytes, block_bytes, descriptor) for block in blocks]
        remote = agent.get_xfer_descs(remote, "FILE")
        handle = agent.initialize_xfer(verb.upper(), local, remote, AGENT)
        assert agent.transfer(handle) != "ERR"
        return handle

    def end(handle):
        while (state := agent.check_xfer_state(handle)) != "DONE":
            assert state != "ERR"
            time.sleep(0.0001)
        agent.release_xfer_handle(handle)

    start_s, start_cpu_s = time.monotonic(), cpu_s()
    pending = []
    for batch, first in enumerate(range(0, block_count, depth)):
        if len(pending) == 2:
            end(pending.pop(0))
        pending.append(begin(first, batch % 2))
    for handle in pending:
        end(handle)
    print(json.dumps({"elapsed_s": time.monotonic() - start_s, "cpu_s": cpu_s() - start_cpu_s}))


if __name__ == "__main__":
    verb, path, block_bytes, block_count, depth, direct = sys.argv[1:]
    run(verb, path, int(block_bytes), int(block_count), int(depth), direct == "1")
