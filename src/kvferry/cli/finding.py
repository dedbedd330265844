"""What a check of `kvferry doctor` found, and what to do about it."""

from enum import Enum

import msgspec


class State(Enum):
    """`WARNING` does not stop an engine; `FAILED` does, or makes it useless."""

    PASSED = "passed"
    WARNING = "warning"
    FAILED = "failed"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `cure` is empty for what passed."""

    check: str
    state: State
    detail: str
    cure: str = ""


def passed(check: str, detail: str) -> Finding:
    return Finding(check, State.PASSED, detail)


def warning(check: str, detail: str, cure: str) -> Finding:
    return Finding(check, State.WARNING, detail, cure)


def failed(check: str, detail: str, cure: str) -> Finding:
    return Finding(check, State.FAILED, detail, cure)
