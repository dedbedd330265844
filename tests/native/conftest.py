"""These tests need the compiled extension."""

import importlib.util

if importlib.util.find_spec("kvferry._native") is None:
    collect_ignore_glob = ["test_*.py"]
