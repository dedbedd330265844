"""A vLLM request as the planner sees it, and adapters by the content of their files."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.keys import encode_extras
from kvferry.vllm_plugin.sharing import EVERYTHING, Sharing
from kvferry.vllm_plugin.weights import adapter_digest

Signature = tuple[tuple[str, int, int, int], ...]
"""Name, length and times (of the content and of the file, nanoseconds) of each file."""


class Adapters:
    """Names adapters by their files. One thread: the runner's, since files may hang.

    vLLM reads an adapter before or at its first request, keeps it, or reads it again at any time.
    So when files have changed since the engine started (`started_s`, wall time), nobody can say
    which version computed what, and nothing names the adapter any more.
    """

    def __init__(self, started_s: float):
        self._started_ns = int(started_s * 1e9)
        self._known: dict[tuple[int, str], tuple[Signature, bytes]] = {}

    def name(self, lora_request: Any) -> bytes | None:
        """32 bytes for a LoRA request whose path is a folder with files older than the engine;
        None: nothing names it."""
        folder = Path(lora_request.lora_path)
        adapter = (lora_request.lora_int_id, lora_request.lora_path)
        try:
            signature = _signature(folder)
            if any(changed_ns > self._started_ns for *_, changed_ns in signature):
                return None
            if adapter not in self._known:
                self._known[adapter] = (signature, adapter_digest(folder))
        except OSError:
            return None
        known_signature, digest = self._known[adapter]
        return digest if signature == known_signature else None


class EngineRequest:
    """`offload.base.Request` over a vLLM request, which it keeps alive. Any thread may read it."""

    def __init__(self, request: Any, adapters: Adapters, sharing: Sharing = EVERYTHING):
        self.request_id: str = request.request_id
        self.tokens: Sequence[int] = request.all_token_ids
        self.is_cacheable = _may_be_shared(request, sharing)
        self.is_readable: bool = not request.skip_reading_prefix_cache
        self.engine_request = self._request = request
        self._is_plain = not request.mm_features and request.prompt_embeds is None
        self._adapters = adapters
        self._adapter: bytes | None = None

    def name(self) -> bool:
        """Keeps the name that it found: a request is computed with one version of its adapter."""
        adapter = self._request.lora_request
        if self.is_cacheable and adapter is not None and self._adapter is None:
            self._adapter = self._adapters.name(adapter)
            self.is_cacheable = self._adapter is not None
        return self.is_cacheable

    def extras(self, start_token: int, end_token: int) -> bytes:
        if start_token and self._is_plain:
            return b""
        extras: list[tuple[str, bytes]] = []
        if start_token == 0:
            extras += self._first_chunk()
        extras += self._media(start_token, end_token)
        if self._request.prompt_embeds is not None:
            extras += self._embeddings(start_token, end_token)
        return encode_extras(extras)

    def _first_chunk(self) -> list[tuple[str, bytes]]:
        """What holds for the whole request: keys are chained, so once is enough."""
        extras = []
        if self._request.cache_salt:
            extras.append(("salt", _encoded(self._request.cache_salt)))
        if self._request.lora_request is not None:
            assert self._adapter is not None, "extras of a request that has no name"
            extras.append(("lora", self._adapter))
        return extras

    def _media(self, start_token: int, end_token: int) -> list[tuple[str, bytes]]:
        """Images and the like that lie in these tokens, with where they begin."""
        extras = []
        for feature in self._request.mm_features:
            offset = feature.mm_position.offset
            if offset < end_token and offset + feature.mm_position.length > start_token:
                at = struct.pack("<q", offset - start_token)
                extras.append(("media", at + _encoded(feature.identifier)))
        return extras

    def _embeddings(self, start_token: int, end_token: int) -> list[tuple[str, bytes]]:
        """Where the prompt is given as vectors, token ids say nothing."""
        vectors = self._request.prompt_embeds[start_token:end_token].contiguous()
        if not len(vectors):
            return []
        is_token = getattr(self._request, "prompt_is_token_ids", None) or ()
        shape = f"{vectors.dtype} {tuple(vectors.shape)}".encode()
        content = hashlib.sha256(vectors.view(torch.uint8).numpy()).digest()
        return [("vectors", content + shape), ("ids", bytes(is_token[start_token:end_token]))]


def _may_be_shared(request: Any, sharing: Sharing) -> bool:
    """As far as can be told at once. Sessions that go on with other tokens are not followed."""
    if not sharing.prefixes or (request.mm_features and not sharing.media):
        return False
    return not getattr(request, "resumable", False)


def _encoded(text: str) -> bytes:
    """What clients send may hold half a character."""
    return text.encode("utf-8", "surrogatepass")


def _signature(folder: Path) -> Signature:
    files = [(path.name, path.stat()) for path in folder.iterdir() if path.is_file()]
    return tuple(sorted((name, of.st_size, of.st_mtime_ns, of.st_ctime_ns) for name, of in files))
