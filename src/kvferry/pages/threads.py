"""How many threads move bytes where nobody has said it."""

import os


def read_threads() -> int:
    """Three for four cores, so that the engine and what drives the threads have the others."""
    return min(max(_core_count() * 3 // 4, 4), 16)


def write_threads(*, is_direct: bool) -> int:
    """One for two cores. Threads that wait for a disk are more than cores; those that copy into
    the page cache only get in each other's way then."""
    return min(max(_core_count() // 2, 4 if is_direct else 1), 8)


def _core_count() -> int:
    return len(os.sched_getaffinity(0))
