"""Module of an EAGLE-3 head (Li et al. 2025, section 3.1, Figure 5)."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.model.cache import KVCache
from drafters.model.draft_head import D2T
from drafters.model.layers import LayerKind, build_module, layer_kind


class Eagle3Layer(nn.Module):
    """A Llama or Qwen3 layer whose attention reads an embedding beside the feature: ``[..., 2 H]`` -> ``[..., H]``.

    Attributes:
        normed_residual: the residual is the feature after ``hidden_norm``, not before it.
    """

    def __init__(self, kind: LayerKind, normed_residual: bool) -> None:
        super().__init__()
        config: Any = kind.config
        layer: Any = build_module(config, kind.decoder_layer, config, layer_idx=0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, outputs, bias=False))
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = build_module(config, kind.norm, config.hidden_size, eps=kind.eps)
        self.normed_residual = normed_residual

    def forward(self, hidden: Tensor, use_cache: bool = False, **given: Any) -> Tensor:
        """The other arguments are those of the decoder layers of transformers."""
        embedding, feature = hidden.chunk(2, dim=-1)
        normed = self.hidden_norm(feature)
        residual = normed if self.normed_residual else feature
        both = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=both, **given)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """``fc`` over the target's states, a layer that reads embeddings too, a norm, and an LM head.

    Parameter names are those that engines load. The embedding is the target's.

    Raises:
        ValueError: the target has no such layers, or fewer tokens than the draft vocabulary.
    """

    inputs = 2  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig, shape: Eagle3Shape) -> None:
        super().__init__()
        shape = shape.settled(target_config.num_hidden_layers)
        shape.check(target_config)
        kind = layer_kind(target_config, shape.layer, shape.shape)
        config: Any = kind.config
        wide, count = config.hidden_size, len(shape.reads)
        config.num_hidden_layers = shape.layers
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * shape.layers
        self.shape, self.config, self.hidden_size = shape, config, wide
        self.fc_norm = nn.ModuleList(self._norm(kind, wide) for _ in shape.reads if shape.fc_norm)
        self.input_norm = self._norm(kind, count * wide) if shape.norm_before_fc else None
        self.fc = nn.Linear(count * wide, wide, bias=False)
        later = [build_module(config, kind.decoder_layer, config, layer_idx=index) for index in range(1, shape.layers)]
        self.layers = nn.ModuleList([Eagle3Layer(kind, shape.norm_before_residual), *later])
        for layer in cast(Any, self.layers):
            layer.self_attn.window = shape.sliding_window  # read in training
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        self.norm = self._norm(kind, wide)
        rows = shape.draft_vocab_size or target_config.vocab_size
        self.lm_head = nn.Linear(wide, rows, bias=False) if shape.own_lm_head else None
        if shape.draft_vocab_size is not None:  # until training or a checkpoint sets it: the first tokens
            self.register_buffer(D2T, torch.zeros(rows, dtype=torch.int64))
        for weights in self.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)

    @property
    def reads_both(self) -> list[nn.Linear]:
        """The linear layers that read an embedding and a feature, side by side."""
        attention: Any = self.layers[0].self_attn
        return [attention.q_proj, attention.k_proj, attention.v_proj]

    @staticmethod
    def _norm(kind: LayerKind, width: int) -> nn.Module:
        return build_module(kind.config, kind.norm, width, eps=kind.eps)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Predict what is fed back, ``[B, T, H]``; ``scored`` of it enters the LM head.

        Args:
            features: ``[B, T, H]``, ``fused`` states of the target, or what this returned before.
            embeddings: ``[B, T, H]``, of the next tokens.
            attention_mask: bool ``[B, 1, T, S]``; None is causal, with the head's sliding window.
        """
        if attention_mask is None and cache is None and (window := self.shape.sliding_window) is not None:
            ones = torch.ones(features.shape[1], features.shape[1], dtype=torch.bool, device=features.device)
            attention_mask = ones.tril().triu(1 - window)[None, None]
        hidden = torch.cat([embeddings, features], dim=-1)
        angles = self.rotary_emb(features, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                position_embeddings=angles,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return self.norm(hidden) if self.shape.norm_output else hidden

    def fused(self, states: Tensor) -> Tensor:
        """Make features ``[..., H]`` of the target's states ``[..., taps * H]``."""
        if len(self.fc_norm):
            parts = states.split(self.hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states if self.input_norm is None else self.input_norm(states))

    def scored(self, predicted: Tensor) -> Tensor:
        """Return what enters the LM head, ``[..., H]``."""
        return predicted if self.shape.norm_output else self.norm(predicted)
