"""Models of well-known shapes with random weights: what a step costs does not hang on what the weights are."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config

from drafters import TargetModel
from drafters.decoding.loading import check_memory
from drafters.decoding.model_files import resolve_dtype
from drafters.decoding.target import Engine, Quantization

# hidden, intermediate, layers, heads, key/value heads, vocabulary
LLAMAS = {
    "llama-5m": (256, 688, 5, 4, 4, 4096),
    "llama-25m": (512, 1376, 6, 8, 8, 8192),
    "llama-100m": (768, 2048, 10, 12, 12, 16384),
    "llama-500m": (1280, 3456, 22, 20, 20, 32000),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
    "llama-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-33b": (6656, 17920, 60, 52, 52, 32000),
    "llama-70b": (8192, 28672, 80, 64, 8, 32000),
}
OTHERS = ("qwen3-8b", "mixtral-8x7b")


def shape_config(shape: str, max_positions: int) -> PretrainedConfig:
    """The configuration of a named shape.

    Raises:
        ValueError: no such shape; the message lists those there are.
    """
    common = {"max_position_embeddings": max_positions, "tie_word_embeddings": False}
    if shape == "qwen3-8b":
        return Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            **common,
        )
    if shape == "mixtral-8x7b":
        return MixtralConfig(vocab_size=32000, **common)  # its defaults are the model's own
    if shape not in LLAMAS:
        raise ValueError(f"there is no shape {shape!r}; known: {', '.join([*LLAMAS, *OTHERS])}")
    hidden, intermediate, layers, heads, kv_heads, vocab = LLAMAS[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        **common,
    )


def random_target(
    shape: str,
    max_positions: int,
    dtype: str,
    device: str | None = None,
    engine: Engine | None = None,
    quantize: Quantization | None = None,
    seed: int = 0,
    cache_tokens: tuple[int, int] = (0, 0),
) -> TargetModel:
    """A target of a named shape, made on the device; ``cache_tokens`` as of ``TargetModel.from_pretrained``.

    Raises:
        ValueError: no such shape, device or dtype, or too little memory.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch finds no CUDA device here; use device=cpu")
    config, kind = shape_config(shape, max_positions), resolve_dtype(dtype)
    check_memory(shape, config, kind, [where], *cache_tokens)
    torch.manual_seed(seed)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="sdpa")
    return TargetModel(model, name=f"{shape} (random weights)", engine=engine, quantize=quantize)
