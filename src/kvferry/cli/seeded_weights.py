"""Weights that follow from a seed, made where the model runs: the same in every engine process.

Flat logits prove nothing: with vLLM's dummy weights every token is about as likely as any other.
These are normal with unit gain, attention is sharp, and logits have a deviation of 4, so that an
answer depends on the whole context.
"""

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "seeded"
SEED = 1
SHARPNESS = 2.0
LOGIT_DEVIATION = 4.0


def register() -> None:
    """Makes `load_format="seeded"` known to the vLLM of this process."""
    register_model_loader(LOAD_FORMAT)(SeededLoader)


class SeededLoader(DummyModelLoader):
    """Loads nothing."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        parameters = dict(model.named_parameters())
        device = next(iter(parameters.values())).device
        generator = torch.Generator(device=device).manual_seed(SEED)
        with torch.no_grad():
            for name, weight in parameters.items():
                _fill(name, weight, generator)


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.dim() == 2:
        gain = LOGIT_DEVIATION if "lm_head" in name else 1.0
        weight.normal_(0.0, gain / weight.shape[1] ** 0.5, generator=generator)
    elif "norm" in name:
        weight.fill_(SHARPNESS if "q_norm" in name or "k_norm" in name else 1.0)
    else:
        weight.zero_()
