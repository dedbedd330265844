"""kvferry moves the KV cache of a large language model out of one engine and into another.

Importing this package loads neither torch, vLLM, NIXL nor the native extension.
"""

__version__ = "0.1.0"
