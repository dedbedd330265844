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
from kvferry.transfer.compatibility import Compatibility, compatibility_of
from kvferry.transfer.handshake import Listener
from kvferry.transfer.nixl_link import NixlLink
from kvferry.transfer.producer import Identity, Prefix, Producer
from kvferry.transfer.settings import Settings
from kvferry.transfer.workers import ProducerWorker

SECRET = b"0123456789abcdef"
NAMESPACE = b"n" * 32
MODELS = (GroupModel(tuple(f"layer {n}" for n in range(4)), 2),)
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


def compatibility(used: Settings) -> Compatibility:
    return compatibility_of({"model": "m"}, used.direction)


class Served:
    """The producer itself. `running`: a prefill that takes steps, and its blocks."""

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
        self.listener = Listener(
            self.settings, boot, compatibility(self.settings), self.clock, self.tally
        )
        end = self.worker.open()
        self.listener.open()
        self.listener.serve((end,))
        self.worker.start()
        identity = Identity(boot, NAMESPACE)
        self.producer = Producer(
            self.settings, self.clock, self.tally, identity, self.listener.port
        )
        self.count = 0
        self.is_ended: set[str] = set()
        self.running: tuple[str, str, range, dict, int] | None = None

    def start(self, params: dict, text: str, token_count: int, first_block: int) -> None:
        self.count += 1
        blocks = range(first_block, first_block - (-token_count // SHAPE.block_tokens[0]))
        self.running = f"request {self.count}", text, blocks, params, token_count
        assert self.producer.appointed(self.running[0], params, Prefix(range(token_count)))
        self.compute(0)

    def compute(self, computed: int) -> None:
        """One step, after which so many tokens are there; with the last one it is finished."""
        request_id, text, blocks, params, token_count = self.running
        self.producer.progress(request_id, computed, (tuple(blocks),))
        self.worker.rank.begin(self.producer.plan())
        for index, block in enumerate(blocks):
            self.group.write(block, index, text, computed)
        self.is_ended |= self.worker.rank.take_ended()
        if computed == token_count:
            prefix = Prefix(range(token_count))
            self.producer.finished(request_id, params, prefix, (tuple(blocks),))
            self.worker.rank.begin(self.producer.plan())

    def abort(self) -> None:
        self.producer.cancel(self.running[0])
        self.worker.rank.begin(self.producer.plan())

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
        ended = sorted(self.is_ended | self.worker.rank.take_ended())
        self.is_ended = set()
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
