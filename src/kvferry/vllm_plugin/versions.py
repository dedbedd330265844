"""All differences between the versions of vLLM that are supported, and nothing else.

Read from the sources of each version; 0.32 is what the tests run on.

| version | what changed for us |
| --- | --- |
| 0.26 | one four-dimensional tensor per layer; MLA three-dimensional; `LLM` loses what is counted
         in a step without output, a load for one: too few hits in its metrics, not in a server's |
| 0.28 | the content dimension may be packed; `LLM` counts every step |
| 0.29 | the CPU backend says on the layer how it packs, before that on its implementation |
| 0.30 | `get_transfer_results` with `failed_recving`; block tables by `kv_connector_block_state`;
         MLA four-dimensional; stats below a `MultiConnector` need not look like a dict |
| 0.31 | `wait_for_save` also on steps without a forward |
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core import kv_cache_utils

from kvferry.errors import ConfigError
from kvferry.offload.base import Tables

FIRST = (0, 26)
LAST = (0, 33)
SEVERAL_GROUPS_FIRST = (0, 30)
"""Older versions cannot report a failed load where there is more than one cache group."""

BlockTables = tuple[list[int], ...]


def check_version(version: str = vllm.__version__) -> tuple[int, int]:
    """(major, minor). Raises ConfigError if this vLLM is not supported."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not FIRST <= found <= LAST:
        raise ConfigError(
            "vllm.version",
            f"kvferry supports vLLM {_text(FIRST)} to {_text(LAST)}, and this is {version}:"
            " install one of these, or a newer kvferry",
        )
    return found


def reports_failed_loads() -> bool:
    """Whether a request's load can be reported failed (else: its blocks)."""
    return hasattr(connector_base, "KVConnectorTransferResults")


def transfer_results(done: set[str], failed: set[str], sent: set[str] = frozenset()) -> Any:
    """What `get_transfer_results` returns, from 0.30 on. `sent`: whose blocks may be freed."""
    return connector_base.KVConnectorTransferResults(
        finished_sending=set(sent), finished_recving=done, failed_recving=failed
    )


def attention_layers(vllm_config: Any, layer_names: Sequence[str]) -> dict[str, Any]:
    """The layer objects by name. Worker side, after the model was loaded."""
    return get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))


def instruction_set(layer: Any) -> str | None:
    """For which one the CPU backend packs a layer's cache; None if it does not say."""
    return getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)


def layer_spec(group_spec: Any, layer_name: str) -> Any:
    """The spec of one layer: groups of layers that differ carry one for each."""
    return getattr(group_spec, "kv_cache_specs", {}).get(layer_name, group_spec)


def layer_specs(group: Any) -> list[Any]:
    """The specs of all layers of a cache group."""
    return [layer_spec(group.kv_cache_spec, name) for name in group.layer_names]


def quantisation(spec: Any) -> str:
    """Name of the KV quantisation of a layer: "NONE" if there is none."""
    return getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")


def is_transferable(group: Any) -> bool:
    """False for groups in host memory or rebuilt by the engine itself (from 0.30 on)."""
    return getattr(group, "enable_kv_transfer", True) and not getattr(group, "host_resident", False)


def rewritten_blocks(scheduler_output: Any) -> Sequence[int]:
    """New blocks that the step fills by copying others or with zeros. The newer of vLLM's two
    model runners does that before it calls a connector's worker side."""
    copies = scheduler_output.kv_cache_block_copies
    zeroed = getattr(scheduler_output, "new_block_ids_to_zero", None)
    if not (copies or zeroed):
        return ()
    return [*(copy.dst_block_id for copy in copies or ()), *(zeroed or ())]


def event_hash(block_hash: bytes) -> Any:
    """A block's hash as KV events have it: bytes, or a number where vLLM was told so."""
    return kv_cache_utils.maybe_convert_block_hash(block_hash)


def block_stored(**fields: Any) -> Any:
    """A KV event, with those of the fields that this version has."""
    return _event(kv_events.BlockStored, fields)


def block_removed(**fields: Any) -> Any:
    """As `block_stored`."""
    return _event(kv_events.BlockRemoved, fields)


def _event(kind: Any, fields: dict[str, Any]) -> Any:
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})


class BlockTable:
    """The block table of one cache group of a request, by slices. vLLM keeps an object for each
    block, and those of old blocks are in no processor cache: only what is asked for is touched."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]):
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, part: slice) -> list[int]:
        return [block.block_id for block in self._blocks[part]]


class TableSource:
    """Block tables of the requests of a step, by cache group.

    From 0.30 on the scheduler hands them over, and where it gives us its block manager as well
    they are read there; before, they are followed here (one cache group only, where tables only
    grow). One thread: the scheduler's.
    """

    def __init__(self) -> None:
        self._followed: dict[str, BlockTables] = {}
        self._state: Any = None
        self._blocks_of: Callable[[str], Any] | None = None
        self._must_follow = not reports_failed_loads()

    def bind(self, block_manager: Any) -> None:
        """Of the scheduler that made us; called before the first step, if at all."""
        self._blocks_of = getattr(block_manager, "get_blocks", None)

    def begin_step(self, scheduler_output: Any) -> None:
        if not self._must_follow:
            self._state = scheduler_output.kv_connector_block_state
            return
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            table = self._followed.get(request_id)
            if blocks and table is not None and request_id not in cached.resumed_req_ids:
                for known, added in zip(table, blocks, strict=True):
                    known.extend(added)

    def allocated(self, request_id: str, tables: BlockTables) -> None:
        """The tables of a request that was just given blocks: they are ours from now on."""
        if self._must_follow:
            self._followed[request_id] = tables

    def tables(self, request_id: str) -> Tables:
        """As of the step that began; only for requests that are scheduled in it."""
        if self._must_follow:
            return self._followed[request_id]
        if self._blocks_of is not None:
            return [BlockTable(blocks) for blocks in self._blocks_of(request_id).blocks]
        return self._state.get_block_ids(request_id)

    def finished(self, request_id: str) -> None:
        self._followed.pop(request_id, None)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


class SubscriptableStats(KVConnectorStats):
    """Before 0.30, below a `MultiConnector`, vLLM reads stats that have stayed in one process as
    the dict that they are after they have crossed to another."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def cache_hit_source(tier: str = "DISK") -> Any:
    """How vLLM labels our hits, from 0.32 on."""
    source = getattr(connector_base, "CacheHitSource", None)
    return None if source is None else source[tier]
