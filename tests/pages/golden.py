"""Golden files are text: rows of hex, with runs of zero bytes left out."""

import json
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def to_rows(block: bytes) -> dict[str, str]:
    """Offset and content of each 16 bytes that are not all zero."""
    rows = {f"{start:04x}": block[start : start + 16].hex() for start in range(0, len(block), 16)}
    return {offset: row for offset, row in rows.items() if row.strip("0")}


def load(name: str) -> dict:
    """A golden file."""
    return json.loads((GOLDEN / name).read_text())
