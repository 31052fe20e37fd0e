"""Tiny models with massive activations, as trained ones have them.

On the first token one channel outgrows all others a hundredfold from the first layer on, and the last layer takes it
back, leaving what rounding left.
"""

from typing import Any

import tiny
import torch
from transformers import PreTrainedModel

FIRST = 1  # the token that gets them
HEIGHT = 6000.0
CHANNEL, MARK = 5, 11  # the channel that gets them, and the one that marks the token
IDS = torch.arange(FIRST, FIRST + 12)[None]


def massive(family: str, **changes: Any) -> PreTrainedModel:
    """``tiny.build`` with a neuron in the first layer that puts ``HEIGHT`` into a channel, and one in the last that
    takes it out."""
    model: Any = tiny.build(family, **changes)
    layers = model.model.layers
    embedding = model.model.embed_tokens.weight.data
    embedding[:, [CHANNEL, MARK]] = 0.0
    embedding[FIRST, MARK] = 20.0
    for layer in layers:  # nothing else writes there
        layer.self_attn.o_proj.weight.data[[CHANNEL, MARK]] = 0.0
        layer.mlp.down_proj.weight.data[[CHANNEL, MARK]] = 0.0
    for mlp, channel, height in ((layers[0].mlp, MARK, HEIGHT), (layers[-1].mlp, CHANNEL, -HEIGHT)):
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight.data[0] = 0.0
            projection.weight.data[0, channel] = 1.0
        mlp.down_proj.weight.data[:, 0] = 0.0
        seen: list[torch.Tensor] = []
        hook = mlp.down_proj.register_forward_hook(lambda module, given, out, seen=seen: seen.append(given[0]))
        model(IDS)
        hook.remove()
        mlp.down_proj.weight.data[CHANNEL, 0] = height / seen[0][0, 0, 0]
    return model
