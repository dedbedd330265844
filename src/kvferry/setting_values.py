"""Values of settings: sizes, and what is said of values that cannot be right."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from kvferry.errors import ConfigError

SIZE_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
DURATION_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}


def parse_size(name: str, text: str) -> int:
    """ "200GiB" to bytes. Units are powers of 1024: KiB, MiB, GiB, TiB, PiB, or none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None:
        raise wrong(name, text, 'a number of bytes, or a size such as "200GiB"')
    number, unit = match.groups()
    if unit not in SIZE_UNITS:
        units = list(filter(None, SIZE_UNITS))
        raise wrong(name, text, f"a size in {', '.join(units)}", unit, units)
    return (
        int(float(number) * SIZE_UNITS[unit]) if "." in number else int(number) * SIZE_UNITS[unit]
    )


def parse_duration_s(name: str, text: str) -> float:
    """ "36h" to seconds. Units: s, min, h, d, or none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in DURATION_UNITS:
        raise wrong(name, text, 'a number of seconds, or a time such as "36h" (s, min, h, d)')
    return float(match[1]) * DURATION_UNITS[match[2]]


def wrong(
    name: str, value: Any, expected: str, word: Any = None, words: Sequence[str] = ()
) -> ConfigError:
    """One message for every field. `words`: what the wrong `word` may have been meant to be."""
    message = f"{name}: expected {expected}, got {value!r}" + _suggestion(word, words)
    return ConfigError("config.wrong_value", message, key=name)


def unknown_key(name: str, value: Any, known: Sequence[str]) -> ConfigError:
    """The same for a key that is none."""
    suggestion = _suggestion(name, known) or f". Valid keys: {', '.join(known)}"
    message = f"unknown key {name!r} (value {value!r}) in kv_connector_extra_config" + suggestion
    return ConfigError("config.unknown_key", message, key=name)


def _suggestion(word: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(word), known, 1, 0.5)
    return f". Did you mean {near[0]!r}?" if near else ""
