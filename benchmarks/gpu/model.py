"""A model folder of a named shape for real vLLM, with a tokenizer that is never used.

    python model.py FOLDER 8b            configuration only: vLLM's load_format="dummy"
    python model.py FOLDER 0.6b --seed 1 weights too: normal, and sharp enough that logits differ

Flat logits prove nothing: with vLLM's dummy weights every token is about as likely as any other.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 16384,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}


def configuration(shape: str) -> Qwen3Config:
    config = Qwen3Config(
        **SHAPES[shape],
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        eos_token_id=0,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def save_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def save_weights(folder: Path, config: Qwen3Config, seed: int) -> None:
    """Normal weights of unit gain; the head is scaled so that logits have a deviation of 4."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device), torch.no_grad():
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 4.0 if "lm_head" in name else 1.0
                weight.normal_(0.0, gain / weight.shape[1] ** 0.5)
            elif "q_norm" in name or "k_norm" in name:
                weight.fill_(2.0)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    config = configuration(arguments.shape)
    save_tokenizer(arguments.folder)
    if arguments.seed is None:
        config.save_pretrained(arguments.folder)
    else:
        save_weights(arguments.folder, config, arguments.seed)


if __name__ == "__main__":
    main()
