"""Which CUDA calls blocked a thread, and whose they were, from a trace of torch's profiler.

A call is kvferry's if a Python frame of the package is open around it, the benchmark's own left
out. A copy of memory that is not pinned blocks as well, whatever it is called.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BLOCKING = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cudaMemcpy",
    "cudaMemset",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaHostRegister",
)
RUNTIME = ("cuda_runtime", "cuda_driver")
OWN_FRAME = re.compile(r"(?:^|/)kvferry/(?!cli/)[\w/]+\.py\(")

Event = Mapping[str, Any]


def count(trace: Path, thread: int) -> dict[str, Any]:
    """`thread`: its native id. Frames and calls that were seen at all are counted too: where none
    were, nothing is shown."""
    events = json.loads(trace.read_text())["traceEvents"]
    own = [event for event in events if event.get("ph") == "X" and event.get("tid") == thread]
    frames = [event for event in own if event.get("cat") == "python_function"]
    calls = [event for event in own if event.get("cat") in RUNTIME]
    pageable = set(_pageable(events))
    blocking = [call for call in calls if _blocks(call, pageable)]
    ours = list(_inside(blocking, [frame for frame in frames if _is_ours(frame)]))
    return {
        "frames": len(frames),
        "frames_of_kvferry": sum(map(_is_ours, frames)),
        "calls": len(calls),
        "blocking": _names(blocking),
        "blocking_of_kvferry": _names(call for call, _ in ours),
        "places_of_kvferry": sorted({frame["name"] for _, frame in ours}),
    }


def _pageable(events: Iterable[Event]) -> Iterator[int]:
    """Correlation ids of copies from or to memory that is not pinned."""
    for event in events:
        if event.get("cat") == "gpu_memcpy" and "ageable" in event.get("name", ""):
            yield event["args"].get("correlation", -1)


def _blocks(call: Event, pageable: set[int]) -> bool:
    return call["name"] in BLOCKING or call.get("args", {}).get("correlation", -2) in pageable


def _is_ours(frame: Event) -> bool:
    return OWN_FRAME.search(frame["name"]) is not None


def _inside(calls: Sequence[Event], frames: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Calls with the innermost of the frames around them; those without one are left out."""
    for call in calls:
        around = [
            frame
            for frame in frames
            if frame["ts"] <= call["ts"] <= call["ts"] + call["dur"] <= frame["ts"] + frame["dur"]
        ]
        if around:
            yield call, min(around, key=lambda frame: frame["dur"])


def _names(calls: Iterable[Event]) -> dict[str, int]:
    return dict(Counter(call["name"] for call in calls))
