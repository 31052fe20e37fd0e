"""Module of a DFlash2 head (z-lab, August 2026, inco.ai/blog/dflash2): DFlash's backbone, convolutions, a selector.

Before and after attention and MLP of each layer a grouped dynamic convolution mixes a row of the block with the rows
before it. The selector rescores the likeliest candidates of a slot by the token before it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.block.module import BlockBackbone
from drafters.heads.dflash2.shape import DFlash2Shape

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


class GroupedConv(nn.Module):
    """Convolution around a sublayer, over the rows of a block: with the normed input x, row i and channel c,

        y[i, c] = sum_t (base[0, t, c] + delta[i, 0, t, group(c)]) x[i - t, c],  delta = kernel_projection(x)
        z[i, c] = sum_t (base[1, t, c] + delta[i, 1, t, group(c)]) sublayer(y)[i - t, c]

    A new one is the identity: z = sublayer(x).
    """

    def __init__(self, width: int, shape: DFlash2Shape) -> None:
        super().__init__()
        taps, self.group = shape.conv_kernel_size, shape.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """``[N, T, H]`` -> ``[N, T, H]``: N blocks of T rows."""
        taps = self.base_kernel.shape[1]
        delta = self.kernel_projection(x).unflatten(-1, (2, taps, -1)).repeat_interleave(self.group, dim=-1)
        kernels = self.base_kernel + delta  # [N, T, 2, taps, H]
        return _convolved(sublayer(_convolved(x, kernels[..., 0, :, :])), kernels[..., 1, :, :])


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """``[N, T, H]``, by each row's ``kernel [N, T, taps, H]``; nothing stands before a block's first row."""
    mixed = kernel[..., 0, :] * x
    for tap in range(1, kernel.shape[-2]):
        mixed = mixed + kernel[..., tap, :] * F.pad(x[:, :-tap], (0, 0, tap, 0))
    return mixed


class ConvLayer(nn.Module):
    """A decoder layer with convolutions around its attention and its MLP.

    Args:
        layer: of Llama's or Qwen3's kind; this one takes over its parts. width: of a state.
    """

    def __init__(self, layer: Any, width: int, shape: DFlash2Shape) -> None:
        super().__init__()
        self.rows = shape.rows
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.attention_conv, self.mlp_conv = GroupedConv(width, shape), GroupedConv(width, shape)

    def forward(self, hidden: Tensor, use_cache: bool = False, **arguments: Any) -> Tensor:
        """``[B, T, H]`` of whole blocks -> the same; the other arguments are those of the family's decoder layers."""

        def attend(rows: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(hidden_states=rows.view_as(hidden), **arguments)[0]
            return attended.view_as(rows)

        states = hidden.reshape(-1, self.rows, hidden.shape[-1])  # [blocks, rows, H]
        states = states + self.attention_conv(self.input_layernorm(states), attend)
        states = states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)
        return states.view_as(hidden)


class CandidateSelector(nn.Module):
    """Scores of the candidates c of a slot with the state h after the token p, of rank r:

    ``unary(c) + sum_r predecessor[p]_r hidden_projection(h)_r successor[c]_r``
    """

    def __init__(self, vocab_size: int, width: int, rank: int, std: float) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        for weights in self.parameters():
            nn.init.normal_(weights, std=std)

    def forward(self, unary: Tensor, candidates: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """float32 ``[..., k]``.

        Args:
            unary: ``[..., k]`` logits of the LM head. candidates: ``[..., k]`` their tokens.
            states: ``[..., H]``. previous: ``[...]``, the tokens before the slots.
        """
        context = self.predecessor_codebook[previous] * self.hidden_projection(states)  # [..., r]
        edges = self.successor_codebook[candidates] @ context[..., None]
        return unary.float() + edges[..., 0].float()


class DFlash2Head(BlockBackbone):
    """A block's backbone with convolutions and a selector; raises as the backbone. A new one drafts as DFlash does, but
    for the selector's random scores."""

    def __init__(self, target_config: PretrainedConfig, shape: DFlash2Shape) -> None:
        super().__init__(target_config, shape)
        self.layers = nn.ModuleList(ConvLayer(layer, self.hidden_size, shape) for layer in self.layers)
        self.candidate_selector = CandidateSelector(
            target_config.vocab_size, self.hidden_size, shape.selector_rank, self.config.initializer_range
        )
