"""The published heads' forwards, written from the papers' descriptions alone: every step spelt out, in float64.

EAGLE (Li et al. 2024, Figure 6): fc over [embedding of token_{i+1}, feature_i], then a decoder layer of Llama without
its input norm. Kangaroo (Liu et al. 2024, section 3): norm(x + attention(norm(x))) over states of the exit layer, with
the rotation of Llama 1 (base 10000).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

Weights = Mapping[str, Tensor]


def eagle_features(weights: Weights, config: PretrainedConfig, features: Tensor, embeddings: Tensor) -> Tensor:
    """``[T, H]`` features and the next tokens' embeddings -> the next features ``[T, H]``."""
    found = {name: value.double() for name, value in weights.items()}
    hidden = torch.cat([embeddings, features], dim=-1).double() @ found["fc.weight"].T
    hidden = hidden + found.get("fc.bias", torch.zeros(()))
    hidden = hidden + attention(found, config, hidden)
    normed = rms_norm(hidden, found["layers.0.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up, down = (found[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    gated = normed @ gate.T
    return hidden + (gated * gated.sigmoid() * (normed @ up.T)) @ down.T


def served_features(folder: Path, features: Tensor, embeddings: Tensor) -> Tensor:
    """What an engine's Llama makes of an exported EAGLE head: transformers' own layer, of the folder's config.json as
    readers older than transformers 5 take it (RoPE from rope_theta and rope_scaling). ``[1, T, H]`` each."""
    given = json.loads((folder / "config.json").read_text())
    del given["rope_parameters"]
    bias = given["model_type"] == "qwen2" or given.get("qkv_bias", False)
    keys = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps"
    kept = {
        key: given[key] for key in f"{keys} max_position_embeddings rope_theta rope_scaling".split() if key in given
    }
    config = LlamaConfig(**kept, num_hidden_layers=1, attention_bias=bias, attn_implementation="eager")
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = torch.nn.Identity()
    weights = load_file(folder / "model.safetensors")
    own = {name.removeprefix("layers.0."): value for name, value in weights.items() if name.startswith("layers.0.")}
    if bias:
        own["self_attn.o_proj.bias"] = torch.zeros(config.hidden_size)
    layer.load_state_dict(own)
    positions = torch.arange(features.shape[1])[None]
    hidden = torch.cat([embeddings, features], dim=-1) @ weights["fc.weight"].T + weights.get("fc.bias", 0)
    later = torch.full((1, 1, *[features.shape[1]] * 2), float("-inf")).triu(1)
    with torch.no_grad():
        angles = LlamaRotaryEmbedding(config)(hidden, positions)
        return layer(hidden, attention_mask=later, position_embeddings=angles)


def kangaroo_states(weights: Weights, config: PretrainedConfig, exits: Tensor) -> Tensor:
    """States of the exit layer ``[T, H]`` -> states for the LM head ``[T, H]``."""
    found, hidden = {name: value.double() for name, value in weights.items()}, exits.double()
    normed = rms_norm(hidden, found["layers.0.input_layernorm.weight"], config.rms_norm_eps)
    return rms_norm(hidden + attention(found, config, normed), found["norm.weight"], config.rms_norm_eps)


def assert_equal(ours: Tensor, published: Tensor) -> None:
    """float32 against float64, to 1e-5 of the largest value."""
    assert (ours - published).abs().max() <= 1e-5 * published.abs().max()


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x), weighted."""
    return weight * hidden / (hidden.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def attention(weights: Weights, config: PretrainedConfig, hidden: Tensor) -> Tensor:
    """Causal attention of one row after the other; a key head serves as many query heads as there are of these."""
    count, dim = len(hidden), config.hidden_size // config.num_attention_heads
    heads, keys_heads = config.num_attention_heads, config.num_key_value_heads
    q, k, v = ((hidden @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(count, -1, dim) for name in "qkv")
    q, k = rotated(q), rotated(k)
    out = torch.zeros(count, heads, dim, dtype=torch.float64)
    for row in range(count):
        for head in range(heads):
            of = head // (heads // keys_heads)
            scores = torch.stack([q[row, head] @ k[past, of] for past in range(row + 1)]) / dim**0.5
            out[row, head] = scores.softmax(0) @ v[: row + 1, of]
    return out.reshape(count, -1) @ weights["layers.0.self_attn.o_proj.weight"].T


def rotated(heads: Tensor) -> Tensor:
    """RoPE of ``[T, heads, D]``: the pair (x_j, x_{j + D/2}) at position t turns by t / 10000^(2j/D)."""
    half = heads.shape[-1] // 2
    angles = torch.arange(len(heads))[:, None] / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    cos, sin, first, second = angles.cos()[:, None], angles.sin()[:, None], heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
