"""A producer in a process of its own, over NIXL: what the tests of real faults talk to.

Lines on standard input are commands, each is answered by one line of JSON.
"""

import json
import subprocess
import sys
from pathlib import Path

from kvferry.clock import SystemClock
from kvferry.device.host import HostCopier
from kvferry.testing.kv_memory import EngineShape, GroupModel, engine_memory, rank_layouts
from kvferry.testing.tally import Tally
from kvferry.transfer.compatibility import Compatibility
from kvferry.transfer.handshake import Listener
from kvferry.transfer.nixl_link import NixlLink
from kvferry.transfer.producer import Identity, Prefix, Producer
from kvferry.transfer.settings import Settings
from kvferry.transfer.workers import ProducerWorker

SECRET = b"0123456789abcdef"
NAMESPACE = b"n" * 32
MODELS = (GroupModel(tuple(f"layer {n}" for n in range(4)), 2),)
COMPATIBILITY = Compatibility({"model": "m"})
BLOCKS = 512
SHAPE = EngineShape(1, (16,), (1,), ("LBHN",), BLOCKS)


def settings(**changes) -> Settings:
    return Settings(
        **{
            "secret": SECRET,
            "staging_bytes": 4 << 20,
            "slot_bytes": 1 << 18,
            "quarantine_bytes_max": 2 << 20,
            "tokens_min": 1,
            "rest_s": 1.0,
            "redial_s": 0.2,
            **changes,
        }
    )


class Served:
    """The producer itself."""

    def __init__(self, changes: dict):
        self.settings, self.clock, self.tally = settings(**changes), SystemClock(), Tally()
        self.memory = engine_memory(MODELS, SHAPE)
        (groups,) = self.memory
        (self.group,) = groups
        (layout,) = rank_layouts(self.memory)
        self.worker = ProducerWorker(
            self.settings,
            self.clock,
            self.tally,
            NixlLink(self.clock),
            layout,
            [self.group.memory],
            lambda regions, geometry: HostCopier(regions, geometry, 1),
        )
        boot = self.clock.random_bytes(16)
        self.listener = Listener(self.settings, boot, COMPATIBILITY, self.clock, self.tally)
        end = self.worker.open()
        self.listener.open()
        self.listener.serve((end,))
        self.worker.start()
        identity = Identity(boot, NAMESPACE)
        self.producer = Producer(
            self.settings, self.clock, self.tally, identity, self.listener.port
        )
        self.count = 0

    def prefill(self, text: str, token_count: int, first_block: int) -> dict:
        blocks = range(first_block, first_block - (-token_count // SHAPE.block_tokens[0]))
        for index, block in enumerate(blocks):
            self.group.write(block, index, text)
        self.count += 1
        params = self.producer.finished(
            f"request {self.count}",
            {"do_remote_decode": True},
            Prefix(range(token_count)),
            (tuple(blocks),),
        )
        self.worker.rank.begin(self.producer.plan())
        return params

    def overwrite(self, first_block: int, count: int) -> None:
        for block in range(first_block, first_block + count):
            self.group.write(block, 0, "another user's text")

    def ended(self) -> list[str]:
        ended = sorted(self.worker.rank.take_ended())
        self.producer.ended(ended)
        return ended

    def expired_count(self) -> int:
        return self.tally["leases_ended_total.expired"]

    def held_blocks(self) -> int:
        return self.producer.held_block_count

    def port(self) -> int:
        return self.listener.port

    def close(self) -> None:
        self.listener.close()
        self.worker.close()


class Peer:
    """The process, from the side of a test."""

    def __init__(self, **changes):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.peer", json.dumps(changes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
        )
        assert self._answer() == "ready"

    def ask(self, verb: str, *arguments):
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        for line in self.process.stdout:
            if line.startswith("> "):  # NIXL writes lines of its own
                return json.loads(line[2:])
        raise AssertionError("the producer has ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    served = Served(json.loads(sys.argv[1]))
    print("> " + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print("> " + json.dumps(getattr(served, verb)(*arguments)), flush=True)
    served.close()


if __name__ == "__main__":
    main()
