"""What tells two models' weights apart: part of the identity of every page.

A hub model is named as the engine was told (a repository may hold several quantisations) and by its
resolved commit. A local folder is named by what it holds: configuration files and code, the header
of every weight file (names, shapes, offsets of all tensors) and samples of every tensor, so that
two fine-tunes of one base differ. Reading all weights would take as long as loading them; a change
that leaves every sample untouched goes unseen, and `model_id` is the remedy. So it is where the
weights come from elsewhere than the model's own files.

Adapters (LoRA) are small and named by all of their bytes.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.keys import Field

COMMIT = re.compile("[0-9a-f]{40}")
SAMPLE_BYTES = 1024
SAMPLES_PER_FILE = 256
"""Of weight files that do not say where their tensors lie."""

CONFIGURATIONS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Which of them are read depends on load format and model: all count, also one folder down."""

OWN_FILES = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "mistral",
    "pt",
    "npcache",
    "bitsandbytes",
    "gguf",
)
"""Load formats that read the files of the model's own folder or repository, and no others."""

COMPUTES = ("model_class_overrides", "quantization_config", "code_revision")
"""Settings of a model, where they are set, that change what is computed from the same weights."""

MEDIA = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
"""Those that change what becomes of images, sounds and videos."""


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
        "computes": _computes(model),
    }


def folder_digest(folder: Path) -> bytes:
    """32 bytes that name a model's folder. Raises ConfigError if it holds no weights."""
    digest = hashlib.sha256(b"kvferry model 2\x00")
    for path in _files(folder, CONFIGURATIONS):
        _add(digest, _place(path, folder), path.read_bytes())
    files = _files(folder, WEIGHTS)
    if not files:
        raise _nameless(f"no weights in {folder}")
    for path in files:
        _add(digest, _place(path, folder), *_samples(path))
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
    load = vllm_config.load_config
    path = Path(model.model)
    if load.load_format == "dummy":
        return {"dummy": _configuration(model), "seed": model.seed, **_split(vllm_config)}
    if load.load_format not in OWN_FILES or getattr(model, "model_weights", ""):
        raise _nameless(f"load format {load.load_format!r} may take the weights from elsewhere")
    loading: dict[str, Field] = {}
    if load.load_format != "auto" or load.model_loader_extra_config:
        loading = {"format": load.load_format, "loader": _text(load.model_loader_extra_config)}
    if path.is_dir():
        return {"folder": folder_digest(path), **loading}
    if path.is_file():
        return {"file": hashlib.sha256(b"".join(_samples(path))).digest(), **loading}
    commit = _commit(model)
    if not commit:
        raise _nameless(f"nothing names the weights of {model.model!r} (no folder, no commit)")
    return {"commit": commit, "name": model.model, **loading}


def _nameless(reason: str) -> ConfigError:
    return ConfigError(
        "vllm.model_identity", f"{reason}: set model_id to a name for this model", key="model_id"
    )


def _commit(model: Any) -> str | None:
    """Of the repository of the weights. The configuration's is that one, unless it was said to come
    from another place."""
    revision = getattr(model, "revision", None)
    if resolved := getattr(revision, "resolved", None):
        return resolved
    if not getattr(model, "hf_config_path", None):
        return getattr(model.hf_config, "_commit_hash", None)
    return revision if revision and COMMIT.fullmatch(revision) else None


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
    return _text(model.hf_overrides)


def _depends_on_length(model: Any) -> bool:
    """Some rotary embeddings choose their factors by the longest context allowed."""
    return any(name in _configuration(model) for name in ('"longrope"', '"su"'))


def _media(model: Any) -> str | None:
    """How images and sounds are prepared, where the operator says so."""
    multimodal = getattr(model, "multimodal_config", None)
    said = _said(multimodal, MEDIA)
    if scales := getattr(multimodal, "mm_encoder_fp8_scale_path", None):
        said["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    if "video_pruning_rate" in said:
        said |= _said(multimodal, ["video_pruning_method"])
    return _text(said)


def _said(settings: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those that are set, of a version that has them."""
    values = {name: getattr(settings, name, None) for name in names}
    return {name: value for name, value in values.items() if value}


def _text(value: Any) -> str | None:
    return json.dumps(value, sort_keys=True, default=str) if value else None


def _computes(model: Any) -> str | None:
    said = _said(model, COMPUTES)
    config_format = str(getattr(model, "config_format", "auto"))
    return _text(said | ({} if config_format == "auto" else {"config_format": config_format}))


def _files(folder: Path, kinds: Iterable[str]) -> list[Path]:
    """Of these kinds, in the folder and one below it."""
    found = (folder.glob(place + kind) for kind in kinds for place in ("", "*/"))
    return sorted(path for paths in found for path in paths if path.is_file())


def _place(path: Path, folder: Path) -> bytes:
    return path.relative_to(folder).as_posix().encode()


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
