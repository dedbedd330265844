"""Configuration: one frozen tree, decoded from vLLM's `kv_connector_extra_config`.

An unknown key, a wrong type or an impossible size is a ConfigError that names the key, the value,
what was expected and the nearest valid name. *Cluster* fields must agree between all users of a
store (they are in its superblock or in the namespace); *process* fields may differ.

This module alone reads the environment.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvferry.errors import ConfigError

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
         "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)\s*")

Bytes = int | str
