"""Models of well-known shapes with random weights: what a step costs does not hang on what the weights are."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from drafters import TargetModel
from drafters.decoding.loading import check_memory
from drafters.decoding.model_files import load_config_only, resolve_device, resolve_dtype
from drafters.decoding.target import Engine, Quantization

# hidden, intermediate, layers, heads, key/value heads, vocabulary
LLAMAS = {
    "llama-5m": (256, 688, 5, 4, 4, 4096),
    "llama-25m": (512, 1376, 6, 8, 8, 8192),
    "llama-100m": (768, 2048, 10, 12, 12, 16384),
    "llama-500m": (1280, 3456, 22, 20, 20, 32000),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
}
# published models, by their file in configs/shapes/
FOLDER = Path(__file__).resolve().parents[1] / "configs" / "shapes"
PUBLISHED = {
    "llama-7b": "llama2-7b-chat",
    "llama-3.1-8b": "llama3.1-8b-instruct",
    "llama-13b": "llama2-13b-chat",
    "llama-33b": "vicuna-33b",
    "llama-70b": "llama2-70b-chat",
    "qwen3-8b": "qwen3-8b",
    "mixtral-8x7b": "mixtral-8x7b-instruct",
}


def shape_config(shape: str, max_positions: int) -> PretrainedConfig:
    """The configuration of a named shape.

    Raises:
        ValueError: no such shape; the message lists those there are.
    """
    if shape in PUBLISHED:
        config = load_config_only(str(FOLDER / f"{PUBLISHED[shape]}.json"))
        config.max_position_embeddings = max_positions
        return config
    if shape not in LLAMAS:
        raise ValueError(f"there is no shape {shape!r}; known: {', '.join([*LLAMAS, *PUBLISHED])}")
    hidden, intermediate, layers, heads, kv_heads, vocab = LLAMAS[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
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
    where = resolve_device(device)
    config, kind = shape_config(shape, max_positions), resolve_dtype(dtype)
    check_memory(shape, config, kind, [where], *cache_tokens)
    torch.manual_seed(seed)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="sdpa")
    return TargetModel(model, name=f"{shape} (random weights)", engine=engine, quantize=quantize)
