"""What tells two models' weights apart: part of the identity of every page.

A hub model is named as the engine was told (a repository may hold several quantisations) and by its
resolved commit. A local folder is named by what it holds: configuration
files, the header of every weight file (names, shapes, offsets of all tensors) and samples of every
tensor, so that two fine-tunes of one base differ. Reading all weights would take as long as loading
them; a change that leaves every sample untouched goes unseen, and `model_id` is the remedy.

Adapters (LoRA) are small and named by all of their bytes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.keys import Field

SAMPLE_BYTES = 1024
SAMPLES_PER_FILE = 256
"""Of weight files that do not say where their tensors lie."""

CONFIGURATIONS = ("config.json", "hf_quant_config.json", "quantize_config.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""In the order in which vLLM prefers them: the first kind that is there counts."""


def model_record(config: Config, vllm_config: Any) -> dict[str, Field]:
    """Everything about the model and how it computes that decides the bytes of its KV cache.

    Reads files: seconds on a slow file system. Raises ConfigError where nothing names the model.
    """
    model = vllm_config.model_config
    return {
        "model": config.model_id or _source(vllm_config),
        "weights_id": config.weights_id,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": model.quantization,
        "overrides": _overrides(model),
        "max_model_tokens": model.max_model_len if _depends_on_length(model) else None,
        "media": _media(model),
    }


def folder_digest(folder: Path) -> bytes:
    """32 bytes that name a model's folder. Raises ConfigError if it holds no weights."""
    digest = hashlib.sha256(b"kvferry model 1\x00")
    for name in CONFIGURATIONS:
        if (folder / name).is_file():
            _add(digest, name.encode(), (folder / name).read_bytes())
    files = next(filter(None, (sorted(folder.glob(kind)) for kind in WEIGHTS)), [])
    if not files:
        raise ConfigError(
            "vllm.model_identity",
            f"no weights in {folder}: set model_id to a name for this model",
            key="model_id",
        )
    for path in files:
        _add(digest, path.name.encode(), *_samples(path))
    return digest.digest()


def adapter_digest(folder: Path) -> bytes:
    """32 bytes that name an adapter: all files' names and contents."""
    digest = hashlib.sha256(b"kvferry adapter 1\x00")
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            _add(digest, path.name.encode(), hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def _source(vllm_config: Any) -> Mapping[str, Field]:
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    path = Path(model.model)
    if load_format == "dummy":
        return {"dummy": _configuration(model), "seed": model.seed, **_split(vllm_config)}
    if path.is_dir():
        return {"folder": folder_digest(path)}
    if path.is_file():
        return {"file": hashlib.sha256(b"".join(_samples(path))).digest()}
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            "vllm.model_identity",
            f"nothing names the weights of {model.model!r} (no folder, no commit):"
            " set model_id to a name for this model",
            key="model_id",
        )
    return {"commit": commit, "name": model.model}


def _split(vllm_config: Any) -> Mapping[str, Field]:
    """Dummy weights are drawn rank by rank."""
    parallel = vllm_config.parallel_config
    return {"tp": parallel.tensor_parallel_size, "pp": parallel.pipeline_parallel_size}


def _configuration(model: Any) -> str:
    values = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    return json.dumps(values, sort_keys=True, default=str)


def _overrides(model: Any) -> str | None:
    """What does not come from the weights' own configuration. A function, or another place for the
    configuration, can only be told by what came of it."""
    if callable(model.hf_overrides) or getattr(model, "hf_config_path", None):
        return _configuration(model)
    if not model.hf_overrides:
        return None
    return json.dumps(model.hf_overrides, sort_keys=True, default=str)


def _depends_on_length(model: Any) -> bool:
    """Some rotary embeddings choose their factors by the longest context allowed."""
    return any(name in _configuration(model) for name in ('"longrope"', '"su"'))


def _media(model: Any) -> str | None:
    """How images and sounds are prepared, where the operator says so."""
    multimodal = getattr(model, "multimodal_config", None)
    arguments = getattr(multimodal, "mm_processor_kwargs", None)
    return json.dumps(arguments, sort_keys=True, default=str) if arguments else None


def _samples(path: Path) -> Iterator[bytes]:
    """Length, header and samples of a weight file."""
    length_bytes = path.stat().st_size
    yield length_bytes.to_bytes(8, "little")
    with path.open("rb") as file:
        offsets = range(0, length_bytes, max(1, length_bytes // SAMPLES_PER_FILE))
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(header_bytes)
            yield header
            offsets = _tensor_offsets(json.loads(header), 8 + header_bytes)
        for offset in offsets:
            file.seek(offset)
            yield file.read(SAMPLE_BYTES)


def _tensor_offsets(header: Mapping[str, Any], data_offset: int) -> list[int]:
    """The start and the middle of every tensor."""
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return sorted(data_offset + at for start, end in spans for at in (start, (start + end) // 2))


def _add(digest: Any, *fields: bytes) -> None:
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
