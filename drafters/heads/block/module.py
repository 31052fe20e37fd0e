"""The backbone of block drafters (DFlash, Chen et al. 2026; DSpark, DeepSeek 2026): one pass predicts a whole block.

``fc`` and a norm make context features of the target's states. In every layer, keys and values come from the context
features and from the block, through the same projections; queries come from the block only. So a context token's keys
and values do not depend on the block: decoding computes them once, and keeps them in a cache (``ContextLayer``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.block.shape import BlockShape
from drafters.model.cache import KVCache
from drafters.model.fused import signed
from drafters.model.layers import build_module, layer_kind
from drafters.model.rows import EVERYTHING, Rows, Scope
from drafters.model.runner import Transform

States = tuple[Tensor, Tensor]  # keys and values, [B, key heads, T, D] each


class BlockBackbone(nn.Module):
    """``fc``, decoder layers of Llama or Qwen3, and a final norm; parameter names are those that engines load.

    The embedding is the target's, except for ``mask_embedding``, and so is the LM head without ``draft_vocab_size``.

    Raises:
        ValueError: the target has no such states, or fewer tokens.
    """

    def __init__(self, target_config: PretrainedConfig, shape: BlockShape) -> None:
        super().__init__()
        shape = shape.settled(target_config.num_hidden_layers)
        shape.check(target_config)
        kind = layer_kind(target_config, shape.layer, shape.shape)
        config: Any = kind.config
        config.num_hidden_layers, wide = shape.layers, config.hidden_size
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * shape.layers  # windows are ``scopes``
        self.shape, self.config, self.hidden_size = shape, config, wide
        self.fc = nn.Linear(len(shape.reads) * wide, wide, bias=False)
        self.hidden_norm = build_module(config, kind.norm, wide, eps=kind.eps)
        stack: list[Any] = [
            build_module(config, kind.decoder_layer, config, layer_idx=index) for index in range(shape.layers)
        ]
        self.layers = nn.ModuleList(stack)
        for layer, scope in zip(stack, self.scopes, strict=True):
            layer.self_attn.scope = scope  # read in training
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        self.norm = build_module(config, kind.norm, wide, eps=kind.eps)
        self.lm_head: nn.Linear | None = None
        if (rows := shape.draft_vocab_size) is not None:
            self.lm_head = nn.Linear(wide, rows, bias=False)
            # Until training or a checkpoint sets it: the first tokens.
            self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64))
        for weights in self.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
        # Until training or a checkpoint sets it: zeros.
        self.mask_embedding = nn.Parameter(torch.zeros(wide)) if shape.mask_embedding else None

    @property
    def scopes(self) -> list[Scope]:
        """What each layer's rows attend to, beside what ``block_rows`` hides."""
        shape = self.shape
        return [
            Scope(shape.sliding_window, anchored=shape.window_edge == "anchor", causal=shape.causal == "sliding")
            if sliding
            else EVERYTHING
            for sliding in shape.sliding
        ]

    def forward(self, features: Tensor, embeddings: Tensor, position_ids: Tensor, attention_mask: Any = None) -> Tensor:
        """Run blocks over their context, as training does: states for the LM head, ``[B, T, H]``.

        Args:
            features: ``[B, C, taps * H]``, the target's states of C context tokens.
            embeddings: ``[B, T, H]``, the target's of the tokens of all blocks: the anchor and mask tokens of each.
            position_ids: ``[B, C + T]``, of the context, then of the blocks. A block's first row has the position of
                its anchor.
            attention_mask: bool ``[B or 1, 1, T, C + T]``, which keys each row attends to: the context before its
                anchor, and its own block; sliding layers hide more. Or another object that the layers' attention
                function takes. None: all keys, of one block.
        """
        batch, context = features.shape[:2]
        rows = embeddings.shape[1]
        if attention_mask is None:
            attention_mask = embeddings.new_ones(1, 1, rows, context + rows, dtype=torch.bool)
        cos, sin = self.rotary_emb(embeddings, position_ids)
        before = _Context(self.context_states(features, (cos[:, :context], sin[:, :context])))
        hidden, angles = self.embedded(embeddings), (cos[:, context:], sin[:, context:])
        masks = {scope: self._mask(attention_mask, scope, position_ids, context) for scope in {*self.scopes}}
        for layer, scope in zip(self.layers, self.scopes, strict=True):
            hidden = layer(
                hidden,
                attention_mask=masks[scope],
                position_ids=position_ids[:, context:],
                position_embeddings=angles,
                past_key_values=before,
                use_cache=True,
            )
        return self.norm(hidden)

    def _mask(self, mask: Any, scope: Scope, position_ids: Tensor, context: int) -> Any:
        """The mask of layers with this scope; a mask that is no tensor knows the scopes itself."""
        if scope == EVERYTHING or not isinstance(mask, Tensor):
            return mask
        blocks = position_ids[:, context:].unflatten(1, (-1, self.shape.rows))
        seen = [scope.of(each, position_ids).expand(-1, each.shape[1], -1) for each in blocks.unbind(1)]
        return mask & torch.cat(seen, dim=1)[:, None]

    def embedded(self, embeddings: Tensor) -> Tensor:
        """The target's embeddings of whole blocks' tokens ``[B, T, H]`` -> what the first layer reads of them."""
        if self.mask_embedding is None:
            return embeddings
        masked = torch.arange(embeddings.shape[1], device=embeddings.device) % self.shape.rows > 0
        return torch.where(masked[:, None], self.mask_embedding, embeddings)

    def context_features(self, states: Tensor) -> Tensor:
        """Make features ``[..., H]`` of the target's states ``[..., taps * H]``."""
        return self.hidden_norm(self.fc(states))

    def context_states(self, states: Tensor, angles: States) -> list[States]:
        """Each layer's keys and values of context tokens, from the target's states ``[B, C, taps * H]``."""
        features, turns = self.context_features(states), signed(angles)
        parts: list[Any] = [layer.self_attn for layer in self.layers]
        return [_states(part, part.k_proj, part.v_proj, features, turns) for part in parts]


class _Context:
    """The interface of a cache, for training: a layer's keys and values are the context's, then those of the block."""

    def __init__(self, states: list[States]) -> None:
        self.states = states

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> States:
        before = self.states[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)


class ContextLayer:
    """Writes one layer's keys and values of context features to the cache, and returns the features unchanged.

    A part of such layers takes in committed tokens. The layers of the block then attend to the cache.

    Args:
        attention: of the layer; calls read only its ``head_dim`` and ``k_norm``.
        linear: makes the engine's product of a projection.
    """

    groups = 1
    few_rows = 1 << 30  # it attends to nothing, so no number of rows needs a mask

    def __init__(self, attention: Any, linear: Callable[[Any], Transform]) -> None:
        self.attention = attention
        self._keys, self._values = linear(attention.k_proj), linear(attention.v_proj)

    def __call__(self, features: Tensor, angles: Any, mask: Tensor | None, cache: KVCache, index: int) -> Tensor:
        """``[B, C, H]`` -> the same. ``angles``: cos and sin ``[..., D]``, or as fused layers have them."""
        turns = angles if angles[0].dim() == 4 else signed(angles)
        cache.update(*_states(self.attention, self._keys, self._values, features, turns), index)
        return features


def block_rows(size: int, causal: bool, device: torch.device) -> Rows:
    """Rows of a block: each attends to the whole block, or, if ``causal``, to the rows before it and itself."""
    return Rows() if causal else Rows(torch.ones(1, size, size, dtype=torch.bool, device=device))


def _states(attention: Any, k_proj: Transform, v_proj: Transform, features: Tensor, turns: States) -> States:
    """Keys and values ``[B, key heads, C, D]`` of features ``[B, C, H]``; ``turns``: RoPE's ``signed`` angles."""
    width = attention.head_dim
    keys, values = (project(features).unflatten(-1, (-1, width)) for project in (k_proj, v_proj))
    if hasattr(attention, "k_norm"):  # Qwen3
        keys = attention.k_norm(keys)
    cos, sin = turns
    keys = torch.addcmul(keys * cos, keys.roll(width // 2, -1), sin)
    return keys.transpose(1, 2), values.transpose(1, 2)
