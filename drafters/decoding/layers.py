"""Single layers of a target's own kind, to build learned heads from, without loading the target."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer


@dataclass
class LayerKind:
    """Classes of a model family: call them with (config, layer_idx), (config) and (hidden_size, eps)."""

    config: PretrainedConfig
    decoder_layer: type[nn.Module]
    attention: type[nn.Module]
    rotary: type[nn.Module]
    norm: type[nn.Module]


def layer_kind(config: PretrainedConfig) -> LayerKind:
    """Look up the layer classes of ``config``'s family.

    A mixture of experts gets Mistral's dense layer of the same widths: the EAGLE paper's head for Mixtral has 0.28B
    parameters (Table 2), which is one dense layer; eight experts would be 1.4B.
    """
    own = copy.deepcopy(config)
    own.num_hidden_layers = 1
    own._attn_implementation = "sdpa"
    if getattr(own, "layer_types", None):
        own.layer_types = ["full_attention"]
    with torch.device("meta"):
        body: Any = AutoModelForCausalLM.from_config(own, attn_implementation="sdpa", trust_remote_code=False).model
    layer = body.layers[0]
    dense = hasattr(layer, "mlp") and hasattr(layer.mlp, "down_proj") and isinstance(layer.mlp.down_proj, nn.Module)
    return LayerKind(
        config=own,
        decoder_layer=type(layer) if dense else MistralDecoderLayer,
        attention=type(layer.self_attn),
        rotary=type(body.rotary_emb),
        norm=type(body.norm),
    )
