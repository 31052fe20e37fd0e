"""Randomly initialised causal LMs of a few thousand weights: real architectures, no download.

``FAMILIES`` is what a test parametrises over; ``build(family)`` makes the model. The weights are drawn wide enough that
greedy decoding wanders instead of repeating one token, else a drafter that always proposes the same token would pass.
"""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB_SIZE = 97  # odd and prime, so that no shape agrees with another by accident
HIDDEN_SIZE = 48  # 4 heads of 16 make 64: a projection mistaken for the hidden size fails
SLIDING_WINDOW = 8  # shorter than any test's context, so that the window really cuts

FAMILIES = ("llama", "qwen3", "mistral", "mistral-sliding", "mixtral")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny ``family`` model; ``changes`` override single fields (for example vocab_size=101)."""
    options = {**_COMMON, **changes}
    if family == "llama":
        return LlamaConfig(**options)
    if family == "qwen3":
        return Qwen3Config(**options)
    if family == "mistral":
        return MistralConfig(**{"sliding_window": None, **options})
    if family == "mistral-sliding":
        return MistralConfig(**{"sliding_window": SLIDING_WINDOW, **options})
    if family == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        return MixtralConfig(**{**experts, **options})
    raise ValueError(f"no tiny model family {family!r}; known: {', '.join(FAMILIES)}")


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 causal LM on the CPU, in eval mode without gradients; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):  # norms start at one, where leaving one out is unseen
                parameter.data.uniform_(0.5, 1.5)
    return model.eval().requires_grad_(False)
