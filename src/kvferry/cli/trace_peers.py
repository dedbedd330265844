"""The policies of libcachesim on the same trace, where it is installed (`pip install libcachesim`).

They see one chunk after the other, and every chunk that is there counts as a hit, also behind one
that is missing: what they show is at least what they would be worth to prefixes.
"""

from collections.abc import Sequence
from importlib.util import find_spec

from kvferry.cli.trace_cache import Request

PEERS = {"LRU": "LRU", "ARC": "ARC", "S3-FIFO": "S3FIFO", "SIEVE": "Sieve"}


def available() -> list[str]:
    """Names for `replay`; none without the package."""
    return list(PEERS) if find_spec("libcachesim") else []


def replay(requests: Sequence[Request], slot_count: int, name: str) -> int:
    """Chunks of the trace that were there when they were asked for."""
    import libcachesim  # noqa: PLC0415 - a package that only this benchmark uses

    cache = getattr(libcachesim, PEERS[name])(slot_count)
    asked = libcachesim.Request()
    asked.obj_size = 1
    hit_count = 0
    for request in requests:
        for chunk in request.chunks:
            asked.obj_id = chunk
            hit_count += cache.get(asked)
    return hit_count
