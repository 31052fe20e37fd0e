"""Well-known model shapes: the cost of a step does not depend on the weights."""

from pathlib import Path

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"
)  # fmt: skip
LLAMAS = {
    "llama-5m": (256, 688, 5, 4, 4, 4096),
    "llama-25m": (512, 1376, 6, 8, 8, 8192),
    "llama-100m": (768, 2048, 10, 12, 12, 16384),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152),
    "llama-500m": (1280, 3456, 22, 20, 20, 32000),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
}
# Published models by their file in configs/shapes.
FOLDER = Path(__file__).resolve().parents[2] / "configs" / "shapes"
PUBLISHED = {
    "llama-7b": "llama2-7b-chat",
    "llama-3.1-8b": "llama3.1-8b-instruct",
    "llama-13b": "llama2-13b-chat",
    "llama-33b": "vicuna-33b",
    "llama-70b": "llama2-70b-chat",
    "qwen3-8b": "qwen3-8b",
    "mixtral-8x7b": "mixtral-8x7b-instruct",
}


def check_shape(shape: str) -> None:
    """Raise ValueError with the known shapes if there is no such shape."""
    if shape not in LLAMAS and shape not in PUBLISHED:
        raise ValueError(f"there is no shape {shape!r}; known: {', '.join([*LLAMAS, *PUBLISHED])}")
