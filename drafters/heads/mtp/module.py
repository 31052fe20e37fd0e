"""Module of MTP layers (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next and MiMo have the same parts)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.mtp.shape import MTPShape
from drafters.model.cache import KVCache
from drafters.model.layers import LayerKind, build_module, check_head, layer_kind


class MTPParts(nn.Module):
    """The parts around a decoder layer: norms on embedding and hidden state, ``fc`` over both, and the last norm."""

    def __init__(self, kind: LayerKind, shape: MTPShape) -> None:
        super().__init__()
        config, wide = kind.config, kind.config.hidden_size
        self.shape = shape
        self.embed_norm, self.hidden_norm, self.norm = (
            build_module(config, kind.norm, wide, eps=kind.eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * wide, wide, bias=False)

    def enter(self, features: Tensor, embeddings: Tensor, first: Tensor, fc: Callable[[Tensor], Tensor]) -> Tensor:
        """What the layer reads, ``[B, T, H]``; ``first``: bool ``[B, T]``, at position 0 of a text."""
        if self.shape.masks_first:
            embeddings = embeddings.masked_fill(first[..., None], 0)
        return fc(self.side_by_side(features, embeddings))

    def side_by_side(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """What ``fc`` reads, ``[..., 2 H]``."""
        parts = [self.embed_norm(embeddings), self.hidden_norm(features)]
        return torch.cat(parts if self.shape.embedding_first else parts[::-1], dim=-1)

    def scored(self, predicted: Tensor) -> Tensor:
        """Return what enters the LM head, ``[..., H]``."""
        return predicted if self.shape.feeds_back_normed else self.norm(predicted)


class MTPLayer(MTPParts):
    """Decoder layers of the target's family, each with its own parts around it, or all with the same ones.

    The embedding and the LM head are the target's. ``others``: parts of the second and later layers.

    Raises:
        ValueError: no head can be made of the target's kind of layers, or it has no such state.
    """

    inputs = 2  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig, shape: MTPShape | None = None) -> None:
        shape = shape or MTPShape()
        shape.check(target_config)
        kind = layer_kind(target_config)
        config: Any = kind.config
        if getattr(config, "first_k_dense_replace", 0):
            config.first_k_dense_replace = 0  # its index here is 0, and the target's first layers are dense
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[-1:]
        super().__init__(kind, shape)
        self.config = config
        self.layers = nn.ModuleList(
            build_module(config, kind.own_layer, config, layer_idx=0) for _ in range(shape.layers)
        )
        self.others = nn.ModuleList(MTPParts(kind, shape) for _ in self.layers[1:] if not shape.shares)
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.normal_(weights, std=config.initializer_range)
        if not self.fc.weight.is_meta:  # there, torch has no product of experts in float32
            check_head(self, config)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        cache: KVCache | None = None,
        step: int = 0,
    ) -> Tensor:
        """Run a step's layer: hidden states and the next tokens' embeddings ``[B, T, H]`` -> what is fed back, ``[B, T,
        H]``. ``parts(step).scored`` turns it into the input of the LM head.

        ``attention_mask`` is bool ``[B, 1, T, S]``; None is causal.
        """
        parts = self.parts(step)
        hidden = parts.enter(features, embeddings, position_ids == 0, parts.fc)
        hidden = self.layers[step % len(self.layers)](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return parts.norm(hidden) if self.shape.feeds_back_normed else hidden

    def parts(self, step: int) -> MTPParts:
        """Return the parts around the layer of a step."""
        number = step % len(self.layers)
        other: Any = self.others[number - 1] if number and not self.shape.shares else self
        return other  # type: ignore[no-any-return]

    @property
    def reads_both(self) -> list[nn.Linear]:
        """The linear layers that read an embedding and a feature, side by side."""
        return [self.fc, *(other.fc for other in self.others)]  # type: ignore[union-attr, list-item]
