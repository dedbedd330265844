"""The store's pages as vLLM's KV events, for routers that send a request where its prefix is.

As vLLM's own offloading tells them: a chunk is an event with the hashes of its blocks, which are
vLLM's, so that a router knows them from the engine's own events. The medium is STORAGE. Nothing is
told of groups with a window, nor where vLLM does not hash blocks as a group has them.
"""

from typing import Any

from vllm.logger import init_logger

from kvferry.offload.base import Part
from kvferry.offload.scheduler.announcer import Describe, Words
from kvferry.vllm_plugin import versions
from kvferry.vllm_plugin.request import EngineRequest

log = init_logger("vllm.kvferry")

MEDIUM = "STORAGE"


def of_engine(vllm_config: Any, kv_cache_config: Any) -> Describe | None:
    """None: this engine publishes no events, or there is nothing to tell."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if not vllm_config.cache_config.enable_prefix_caching or len(sizes) > 1:
        log.warning(
            "no KV events of the store: they need vLLM's prefix cache, and one block size in all"
            " cache groups"
        )
        return None
    return describe


def describe(request: EngineRequest, part: Part, chunk_index: int) -> Words | None:
    """What is told of a chunk. The scheduler's thread."""
    if part.window_tokens is not None:
        return None
    engine_request = request.engine_request
    size, width = part.chunk_tokens, part.chunk_tokens // part.block_tokens
    first = chunk_index * width
    hashes = engine_request.block_hashes[max(first - 1, 0) : first + width]
    parent, own = (hashes[:1], hashes[1:]) if first else ([], hashes)
    if len(own) < width:
        return None
    names = [versions.event_hash(own_hash) for own_hash in own]
    adapter = engine_request.lora_request
    stored = versions.block_stored(
        block_hashes=names,
        parent_block_hash=versions.event_hash(parent[0]) if parent else None,
        token_ids=list(request.tokens[chunk_index * size : (chunk_index + 1) * size]),
        block_size=part.block_tokens,
        lora_id=adapter.adapter_id if adapter else None,
        lora_name=adapter.name if adapter else None,
        medium=MEDIUM,
        group_idx=part.group_index,
    )
    removed = versions.block_removed(block_hashes=names, medium=MEDIUM, group_idx=part.group_index)
    return Words(stored, removed)
