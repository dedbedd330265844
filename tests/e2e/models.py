"""Tiny seeded models whose logits are peaked, saved as folders that vLLM serves.

Flat logits prove nothing: the argmax of a random tiny model hardly moves when its KV cache is
wrong. These models have weights scaled so that attention is sharp and every logit depends on the
whole context; prompts are token ids, so no tokenizer is needed.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.e2e import installed

VOCABULARY = 512
WINDOW_TOKENS = 128


def full_attention(seed: int = 1, kv_head_count: int = 2) -> PreTrainedModel:
    """Qwen3 shape: 3 layers, KV heads of 32, one cache group."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_head_count,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return _sharpen(Qwen3ForCausalLM(config))


def sliding_window(seed: int = 1) -> PreTrainedModel:
    """Gemma 3 shape: layers alternate between a window of 128 tokens and full attention, so there
    are two cache groups."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return _sharpen(Gemma3ForCausalLM(config))


def _sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Normal weights of unit gain; the head is scaled so that logits have a deviation of 4."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 4.0 if "lm_head" in name else 1.0
                weight.normal_(0.0, gain / weight.shape[1] ** 0.5)
            elif "q_norm" in name or "k_norm" in name:
                weight.fill_(2.0)
    return model.eval()


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "full": full_attention,
    "other": lambda: full_attention(seed=2),
    "few heads": lambda: full_attention(kv_head_count=1),
    "window": sliding_window,
}


def is_served(name: str) -> bool:
    """Whether kvferry serves it with the vLLM that is installed."""
    return name != "window" or installed.SEVERAL_GROUPS_ARE_SERVED


def save(name: str, folder: Path) -> Path:
    """The folder `folder/name`, made unless it is there."""
    target = folder / name
    if not (target / "config.json").exists():
        MAKERS[name]().save_pretrained(target)
    return target


ADAPTER_RANK = 8
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def save_adapter(seed: int, base: Path, target: Path) -> Path:
    """A LoRA adapter of the full attention model, strong enough to change every answer."""
    torch.manual_seed(seed)
    config = Qwen3Config.from_pretrained(base)
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes = dict(zip(ADAPTED, [(128, heads), (128, kv), (128, kv), (heads, 128)], strict=True))
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(ADAPTER_RANK, inputs) / inputs**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, ADAPTER_RANK) * 0.3
    target.mkdir(parents=True)
    save_file(weights, target / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ADAPTED,
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(json.dumps(facts))
    return target
