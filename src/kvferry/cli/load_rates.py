"""Whole loads beside one read of one piece: what claims, staging and copies cost on a link.

    python -m kvferry.cli.load_rates

One line of JSON on standard output. A consumer's rank in this process, producers' ranks in
others, blocks that hold all layers side by side, as on a CPU or with cross-layer blocks on a GPU.
Both are timed in turn, over the same kind of connection. Further producers are met when everything
is warm: what the handshakes with them take is that of a known kind of peer.
"""

import base64
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from kvferry.cli.link_rates import TRANSPORTS, run_apart
from kvferry.clock import Clock, SystemClock
from kvferry.device.host import HostCopier
from kvferry.device.staging import host_memory
from kvferry.errors import UnavailableError
from kvferry.layout import PageGeometry, Region
from kvferry.metrics import Metrics
from kvferry.transfer.base import Ending, Indices, PostEnded, Range, Stride
from kvferry.transfer.compatibility import Compatibility
from kvferry.transfer.halves import ConsumerPlan, Hold, Load, ProducerPlan, Watch
from kvferry.transfer.handshake import Listener
from kvferry.transfer.nixl_link import NixlLink
from kvferry.transfer.params import ID_BYTES, Offer
from kvferry.transfer.settings import Settings
from kvferry.transfer.topology import GroupLayout, RankLayout
from kvferry.transfer.workers import ConsumerWorker, ProducerWorker

LAYERS, HEADS, BLOCK_TOKENS, CONTENT_BYTES = 32, 8, 16, 512
"""An 8B shape: key and value of 128 numbers of two bytes for each head and token."""
BLOCKS = 128
LAYER_BYTES = HEADS * BLOCK_TOKENS * CONTENT_BYTES
BLOCK_BYTES = LAYERS * LAYER_BYTES
MEMORY_BYTES = BLOCKS * BLOCK_BYTES
TABLES = (tuple(range(BLOCKS)),)
TOKENS = BLOCKS * BLOCK_TOKENS
CONTENT = b"Z"
ROUNDS = 9
FURTHER_PEERS = 5
PATIENCE_S = 60.0
STEP_S = 0.0005
COMPATIBILITY = Compatibility({"model": "rates"})
SETTINGS = Settings(secret=b"measured on one machine", dial_timeout_s=30.0, slot_bytes=8 << 20)


def measure() -> dict[str, Any]:
    """By transport: gigabytes per second of loads and of one piece, milliseconds of handshakes."""
    return {transport: run_apart("kvferry.cli.load_rates", transport) for transport in TRANSPORTS}


def layout_of(address: int) -> RankLayout:
    regions = tuple(
        Region(
            f"layer {layer}",
            address + layer * LAYER_BYTES,
            BLOCKS,
            1,
            HEADS,
            BLOCK_TOKENS,
            CONTENT_BYTES,
            BLOCK_BYTES,
            BLOCK_TOKENS * CONTENT_BYTES,
            CONTENT_BYTES,
        )
        for layer in range(LAYERS)
    )
    return RankLayout(0, (GroupLayout(BLOCK_TOKENS, 0, HEADS, False, regions),))


def make_copier(regions: Sequence[Region], geometry: PageGeometry) -> HostCopier:
    return HostCopier(regions, geometry, 1)


class Producer:
    """One rank that offers all of its blocks, again and again."""

    def __init__(self, clock: Clock):
        self._clock = clock
        address, self._memory = host_memory(MEMORY_BYTES)
        ctypes.memset(address, CONTENT[0], MEMORY_BYTES)
        whole = Range(address, MEMORY_BYTES)
        metrics = Metrics()
        self._worker = ProducerWorker(
            SETTINGS,
            clock,
            metrics,
            NixlLink(clock),
            layout_of(address),
            [whole],
            make_copier,
        )
        self._boot = clock.random_bytes(ID_BYTES)
        self._listener = Listener(SETTINGS, self._boot, COMPATIBILITY, clock, metrics)
        end = self._worker.open()
        self._listener.open()
        self._facts = {
            "description": _text(end.description),
            "address": address,
            "boot": _text(self._boot),
            "port": self._listener.port,
        }
        self._listener.serve((end,))
        self._worker.start()

    def facts(self) -> dict[str, Any]:
        return self._facts

    def hold(self) -> dict[str, Any]:
        """A prefill has ended."""
        transfer, generation = (self._clock.random_bytes(ID_BYTES) for _ in range(2))
        self._worker.rank.take_ended()
        hold = Hold(transfer.hex(), transfer, generation, TOKENS, TABLES, b"")
        self._worker.rank.begin(ProducerPlan((hold,)))
        return {"transfer": _text(transfer)}

    def close(self) -> None:
        self._listener.close()
        self._worker.close()


class Peer:
    """That process, from the consumer's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli.load_rates", "producer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, verb: str) -> dict[str, Any]:
        self._process.stdin.write(verb + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError("bench.peer", "a producer's process is gone")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Consumer:
    """One rank that loads."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._metrics = Metrics()
        self._address, self._memory = host_memory(MEMORY_BYTES)
        layout = layout_of(self._address)
        self._worker = ConsumerWorker(
            SETTINGS,
            clock,
            self._metrics,
            NixlLink(clock),
            layout,
            (layout,),
            COMPATIBILITY,
            make_copier,
        )
        self._worker.open()
        self._worker.start()
        self._count = 0

    def granted(self, peer: Peer) -> tuple[str, float]:
        """A request that may load, and how many seconds it waited."""
        transfer, facts = _bytes(peer.ask("hold")["transfer"]), peer.ask("facts")
        boot, port = _bytes(facts["boot"]), facts["port"]
        offer = Offer(transfer, boot, "127.0.0.1", port, b"", b"", TOKENS)
        self._count += 1
        name = f"request {self._count}"
        started_s = self._clock.now_s()
        self._step(ConsumerPlan((Watch(name, offer),)))
        self._until(lambda: name in self._worker.rank.report().granted)
        return name, self._clock.now_s() - started_s

    def load(self, name: str) -> float:
        """Seconds until all is in the blocks."""
        ctypes.memset(self._address, 0, MEMORY_BYTES)
        started_s = self._clock.now_s()
        self._step(ConsumerPlan(loads=(Load(name, TABLES, 0, TOKENS),)))
        self._until(lambda: self._is_loaded(name))
        load_s = self._clock.now_s() - started_s
        if ctypes.string_at(self._address, MEMORY_BYTES).strip(CONTENT):
            raise UnavailableError("bench.load", "other bytes than the producer's")
        return load_s

    def let_go(self, name: str) -> None:
        self._step(ConsumerPlan(drops=(name,)))

    def handshake_ms(self) -> float:
        """All so far."""
        buckets = self._metrics.snapshot()["kvferry_transfer_handshake_seconds"][""]
        return sum(total for _, total in buckets) * 1e3

    def close(self) -> None:
        self._worker.close()

    def _is_loaded(self, name: str) -> bool:
        finished = self._worker.rank.collect()
        if finished.failed:
            raise UnavailableError("bench.load", "a load failed")
        return name in finished.done

    def _step(self, plan: ConsumerPlan) -> None:
        self._worker.rank.begin(plan)
        self._worker.mover.wake()

    def _until(self, holds: Any) -> None:
        give_up_s = self._clock.now_s() + PATIENCE_S
        while not holds():
            if self._clock.now_s() > give_up_s:
                raise UnavailableError("bench.load", f"not within {PATIENCE_S:.0f} s")
            self._step(ConsumerPlan())
            self._worker.rank.wait()


class Whole:
    """A reader that reads all of a producer's memory as one piece."""

    def __init__(self, clock: Clock, peer: Peer):
        self._clock = clock
        self._link = NixlLink(clock)
        self._link.open()
        address, self._memory = host_memory(MEMORY_BYTES)
        self._link.register(Range(address, MEMORY_BYTES))
        facts = peer.ask("facts")
        self._name = self._link.connect(_bytes(facts["description"]))
        self._target, self._source = (
            self._link.table(owner, [Stride(start, MEMORY_BYTES, MEMORY_BYTES, 1)])
            for owner, start in ((None, address), (self._name, facts["address"]))
        )

    def read(self) -> float:
        """Seconds."""
        first = Indices("i", [0])
        started_s = self._clock.now_s()
        self._link.post(self._name, self._target, first, self._source, first)
        while self._clock.now_s() < started_s + PATIENCE_S:
            for event in self._link.poll():
                if isinstance(event, PostEnded) and event.ending is Ending.DONE:
                    return self._clock.now_s() - started_s
        raise UnavailableError("bench.read", f"not read within {PATIENCE_S:.0f} s")

    def close(self) -> None:
        self._link.close(PATIENCE_S)


@contextmanager
def _closing(opened: Any) -> Iterator[Any]:
    try:
        yield opened
    finally:
        opened.close()


def _rates() -> dict[str, Any]:
    clock = SystemClock()
    grants, loads, reads = [], [], []
    with (
        _closing(Peer()) as peer,
        _closing(Consumer(clock)) as consumer,
        _closing(Whole(clock, peer)) as whole,
    ):
        for _ in range(ROUNDS + 1):  # the first one finds memory and connections cold
            name, grant_s = consumer.granted(peer)
            grants.append(grant_s)
            loads.append(consumer.load(name))
            consumer.let_go(name)
            reads.append(whole.read())
        handshakes_ms, first_grants = [consumer.handshake_ms()], [grants[0]]
        for _ in range(FURTHER_PEERS):
            with _closing(Peer()) as other:
                other.ask("facts")
                name, grant_s = consumer.granted(other)
                consumer.let_go(name)
            first_grants.append(grant_s)
            handshakes_ms.append(consumer.handshake_ms() - sum(handshakes_ms))
    load_s, read_s = median(loads[1:]), median(reads[1:])
    return {
        "loads_gb_per_s": round(MEMORY_BYTES / load_s / 1e9, 2),
        "one_piece_gb_per_s": round(MEMORY_BYTES / read_s / 1e9, 2),
        "ratio": round(read_s / load_s, 3),
        "ratio_of_the_fastest": round(min(reads) / min(loads), 3),
        "loads_ms": [round(duration_s * 1e3) for duration_s in loads],
        "one_piece_ms": [round(duration_s * 1e3) for duration_s in reads],
        "handshakes_ms": [round(ms, 1) for ms in handshakes_ms],
        "handshake_with_a_known_kind_ms": round(median(handshakes_ms[1:]), 1),
        "first_grants_ms": [round(grant_s * 1e3, 1) for grant_s in first_grants],
        "later_grants_ms": round(median(grants[1:]) * 1e3, 1),
    }


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1:] != ["producer"]:
        print(json.dumps(_rates()), file=replies, flush=True)
        return
    producer = Producer(SystemClock())
    for line in sys.stdin:
        print(json.dumps(getattr(producer, line.strip())()), file=replies, flush=True)
    producer.close()


if __name__ == "__main__":
    main()
