"""Models of the shapes of eval.rooflines.shapes with random weights."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from drafters import TargetModel
from drafters.common.choices import Engine, Quantization
from drafters.model.files import load_config_only, resolve_device, resolve_dtype
from drafters.model.loading import check_memory
from eval.rooflines.shapes import FOLDER, LLAMAS, PUBLISHED, SIZES, check_shape


def shape_config(shape: str, max_positions: int) -> PretrainedConfig:
    """Return the configuration of a named shape; ValueError with the known ones if there is none."""
    check_shape(shape)
    if shape in PUBLISHED:
        config = load_config_only(str(FOLDER / f"{PUBLISHED[shape]}.json"), may_be_file=True)
        config.max_position_embeddings = max_positions
        return config
    sizes = dict(zip(SIZES, LLAMAS[shape], strict=True))
    return LlamaConfig(**sizes, max_position_embeddings=max_positions, tie_word_embeddings=False)


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
    """Return a target of a named shape, made on the device; ``cache_tokens`` as in ``TargetModel.from_pretrained``."""
    where = resolve_device(device)
    config, kind = shape_config(shape, max_positions), resolve_dtype(dtype, where)
    check_memory(shape, config, kind, [where], *cache_tokens)
    torch.manual_seed(seed)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(
            config, dtype=kind, attn_implementation="sdpa", trust_remote_code=False
        )
    return TargetModel(model, name=f"{shape} (random weights)", engine=engine, quantize=quantize)
