"""What the two roles of the connector send each other inside vLLM's messages: as in the offload
connector, bytes and plain tuples around msgpack."""

from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.transfer.halves import ConsumerPlan, ProducerPlan, Report
from kvferry.transfer.handshake import RankEnd

Fields = dict[str, str | int | bool]


class Plans(msgspec.Struct, frozen=True, array_like=True):
    """Of one step, for both roles that an engine may have."""

    producer: ProducerPlan = ProducerPlan()
    consumer: ConsumerPlan = ConsumerPlan()


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """One rank, once, at start. `fields`: see `compatibility.Compatibility`; `namespace`: digest of
    what must be equal for tokens to have the same KV; `end`: of a producer's rank."""

    rank: int
    fields: Fields
    namespace: bytes
    end: RankEnd | None


_ENCODER = msgspec.msgpack.Encoder()
_PLANS = msgspec.msgpack.Decoder(Plans)
_REPORTS = msgspec.msgpack.Decoder(Report)
_READY = msgspec.msgpack.Decoder(Ready)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step, scheduler to workers.

    `plans`: encoded Plans, empty if there is nothing new; None once the scheduler side stands
    aside. `lost_loads`: loads that the scheduler waits for and no plan will name, request and
    blocks; `lost_holds`: requests whose blocks it keeps though no plan says so. `is_empty`: nothing
    is computed.
    """

    plans: bytes | None
    lost_loads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    lost_holds: tuple[str, ...] = ()
    is_empty: bool = False

    def decode(self) -> Plans | None:
        if self.plans is None:
            return None
        return _PLANS.decode(self.plans) if self.plans else Plans()


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks have to say. `is_aside`: one of them stands aside."""

    reports: tuple[bytes, ...]
    is_aside: bool = False

    def aggregate(self, other: Any) -> "WorkerMetadata":
        return WorkerMetadata(self.reports + other.reports, self.is_aside or other.is_aside)

    def decode(self) -> Report:
        """Of all ranks, merged."""
        merged = Report()
        for report in self.reports:
            merged = merged.merge(_REPORTS.decode(report))
        return merged


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """An encoded Ready, worker to scheduler."""

    ready: bytes

    def decode(self) -> Ready:
        return _READY.decode(self.ready)


def encode(message: Plans | Report | Ready) -> bytes:
    """Empty for plans without news."""
    return b"" if message == Plans() else _ENCODER.encode(message)
