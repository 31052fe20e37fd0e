"""Module of a Kangaroo adapter (Liu et al. 2024)."""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.kangaroo.shape import KangarooShape
from drafters.model.cache import KVCache
from drafters.model.layers import AttentionLayer, build_module, check_head, layer_kind


class KangarooAdapter(nn.Module):
    """``norm(x + Attention(RMSNorm(x)))``: 4 H^2 + 2 H parameters with as many key and value heads as query heads.

    Parameter names are those of the released checkpoints.

    Raises:
        ValueError: no adapter can be made from the target's kind of layers.
    """

    inputs = 1  # number of hidden states that ``forward`` takes

    def __init__(self, target_config: PretrainedConfig, shape: KangarooShape) -> None:
        super().__init__()
        shape.check(target_config)
        self.shape = shape
        kind = layer_kind(target_config)
        config: Any = kind.config
        layer: Any = (
            build_module(config, kind.decoder_layer, config, layer_idx=0) if shape.ffn else AttentionLayer(kind)
        )
        self.layers = nn.ModuleList([layer])
        self.norm = kind.norm(config.hidden_size, eps=kind.eps)
        self.rotary_emb = kind.rotary(config)
        for weights in layer.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
        if shape.own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, target_config.vocab_size, bias=False)
        check_head(self, config)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Hidden states ``[B, T, H]`` after ``exit_layer`` -> states for the LM head ``[B, T, H]``.

        Like the target's, the state at index i predicts token i + 1.

        Args:
            attention_mask: bool ``[B, 1, T, S]``; None is causal.
        """
        after = self.layers[0](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
        )
        return self.norm(after)
