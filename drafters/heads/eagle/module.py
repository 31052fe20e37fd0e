"""Module of an EAGLE head (Li et al. 2024, section 3.1)."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import HeadLayer
from drafters.heads.eagle.shape import EagleShape
from drafters.model.cache import KVCache
from drafters.model.layers import build_module, check_head, layer_kind


class EagleHead(nn.Module):
    """``fc`` over cat(embedding, feature), then a decoder layer, the target's or Llama's, without its input layernorm.

    No final norm; the embedding and the LM head are the target's. Parameter names are those of the released
    checkpoints. A head with one input only (token or feature) has no fc.

    Raises:
        ValueError: no head can be made of the target's kind of layers.
    """

    inputs = 2  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig, shape: EagleShape | None = None) -> None:
        super().__init__()
        self.shape = shape or EagleShape()
        self.shape.check(target_config)
        kind = layer_kind(target_config, cast(HeadLayer, self.shape.layer))
        config: Any = kind.config
        self.config = config
        if self.shape.has_fc:
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=self.shape.fc_bias)
        decoder: Any = build_module(config, kind.decoder_layer, config, layer_idx=0)
        decoder.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([decoder])
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
            elif name == "fc.bias":
                nn.init.zeros_(weights)
        check_head(self, config)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Features ``[B, T, H]`` and the next tokens' embeddings ``[B, T, H]`` (unshifted: those tokens' own) ->
        predicted next features ``[B, T, H]``.

        ``attention_mask`` is bool ``[B, 1, T, S]``; None is causal.
        """
        hidden = self.enter(features, embeddings, getattr(self, "fc", None))
        return self.layers[0](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
            use_cache=cache is not None,
        )

    @property
    def reads_both(self) -> list[nn.Linear]:
        """The linear layers that read an embedding and a feature, side by side."""
        return [self.fc] if self.shape.has_fc else []

    def enter(self, features: Tensor, embeddings: Tensor, fc: Callable[[Tensor], Tensor] | None) -> Tensor:
        """What the layer reads, ``[B, T, H]``."""
        if fc is not None:
            return fc(torch.cat([embeddings, features], dim=-1))
        return embeddings if self.shape.inputs == "token" else features
