"""The transfer connector of a running engine from the inside: what is under way."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvferry.transfer.pushes import Step


def is_there(connector: Any) -> bool:
    """Whether it is the one for transfers."""
    return type(connector).__name__ == "FerryTransferConnector"


def worker_state() -> dict[str, int]:
    """What is under way in this worker."""
    role, state = get_kv_transfer_group()._worker_role, {}
    if role._consumer is not None:
        rank = role._consumer.rank
        state |= {
            "loads": len(rank._active),
            "claims": len(rank._claims._transfers),
            "reads": rank.out_count,
            "staging": rank.taken_count,
        }
    if role._producer is not None:
        rank = role._producer.rank
        state["leases"] = rank._book.lease_count
        if rank._pushes is not None:
            ended = [page for page in rank._pushes._pages.values() if page.step is Step.ENDED]
            state["pages"] = len(ended)
    return state


def scheduler_state(scheduler: Any) -> dict[str, int]:
    """What the scheduler's halves hold, and vLLM's own blocks."""
    role, blocks = scheduler.connector._scheduler._role, scheduler.kv_cache_manager.block_pool
    state = {
        "prefills": len(role._prefills) + len(role._computed),
        "requests": len(scheduler.requests),
        "blocks_in_use": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
    }
    if role._consumer is not None:
        state["records"] = role._consumer.record_count
    if role._producer is not None:
        state["held_blocks"] = role._producer.held_block_count
    return state
