"""What the two roles of the connector send each other inside vLLM's messages.

vLLM pickles these objects between its own processes, so they hold nothing but bytes and plain
tuples; the content is msgpack.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.offload.base import Plan, Report

_ENCODER = msgspec.msgpack.Encoder()
_PLANS = msgspec.msgpack.Decoder(Plan)
_REPORTS = msgspec.msgpack.Decoder(Report)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step, scheduler to workers.

    `plan`: an encoded Plan; None once the scheduler side stands aside. `given_up`: loads that the
    scheduler waits for and no plan will name: request and blocks. `is_empty`: nothing is computed.
    """

    plan: bytes | None
    is_empty: bool
    given_up: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def decode(self) -> Plan | None:
        return None if self.plan is None else _PLANS.decode(self.plan)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks have to say. `is_aside`: one of them stands aside."""

    reports: tuple[bytes, ...]
    is_aside: bool = False

    def aggregate(self, other: Any) -> "WorkerMetadata":
        return WorkerMetadata(self.reports + other.reports, self.is_aside or other.is_aside)

    def decode(self) -> list[Report]:
        return [_REPORTS.decode(report) for report in self.reports]


def encode(message: Plan | Report) -> bytes:
    return _ENCODER.encode(message)
