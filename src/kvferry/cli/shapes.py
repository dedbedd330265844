"""Model shapes by name, as folders that vLLM serves: a configuration and nothing else.

There are no weights and no tokenizer: vLLM is told to make weights up (`seeded_weights`, or its own
`load_format="dummy"`), and prompts are token ids.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import shake_256
from pathlib import Path

from kvferry.errors import ConfigError

POSITIONS = 40_960
FIRST_TOKEN = 4
"""Smaller ids are special in some models."""


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3: the names are those of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def token_slice_bytes(self, element_bytes: int) -> int:
        """Of KV cache: one token, one KV head, all layers."""
        return self.num_hidden_layers * self.head_dim * 2 * element_bytes

    def token_bytes(self, element_bytes: int) -> int:
        """Of KV cache: one token."""
        return self.num_key_value_heads * self.token_slice_bytes(element_bytes)


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(128, 256, 3, 4, 2, 32, 512),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, 16_384),
    "8b": Shape(4096, 12_288, 36, 32, 8, 128, 151_936),
}


def shape_of(name: str) -> Shape:
    if name not in SHAPES:
        raise ConfigError("bench.shape", f"--shape: {', '.join(SHAPES)}, and not {name!r}")
    return SHAPES[name]


def save(shape: Shape, folder: Path) -> None:
    """Writes the model's configuration into `folder`, which is made."""
    folder.mkdir(parents=True)
    configuration = {
        **asdict(shape),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(configuration, indent=1))


def prompt(shape: Shape, token_count: int, name: str) -> list[int]:
    """Token ids that follow from `name` and the length: the same in every process."""
    content = shake_256(f"{token_count} {name}".encode()).digest(4 * token_count)
    span = shape.vocab_size - FIRST_TOKEN
    return [FIRST_TOKEN + number % span for number in memoryview(content).cast("I")]
