"""Module of Medusa heads (Cai et al. 2024, section 2.1.1)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.medusa.shape import MedusaShape


class ResBlock(nn.Module):
    """``x + SiLU(W x + b)`` (section 2.1.1); W and b are initialised to zero: the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """``heads`` stacks of ``layers`` residual blocks, each with an LM head if ``own_lm_heads``.

    Parameter names are those of the released checkpoints. These have own LM heads, and the layers of a head share their
    weights.
    """

    inputs = 1  # number of hidden states that ``forward`` takes

    def __init__(self, target_config: PretrainedConfig, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        width, vocab = target_config.hidden_size, target_config.vocab_size
        for _ in range(shape.heads):
            parts: list[nn.Module] = [ResBlock(width) for _ in range(shape.layers)]
            parts += [nn.Linear(width, vocab, bias=False)] if shape.own_lm_heads else []
            self.append(nn.Sequential(*parts))

    def blocks(self) -> list[list[ResBlock]]:
        """The residual blocks of each head."""
        return [[part for part in head.children() if isinstance(part, ResBlock)] for head in self]

    def lm_heads(self) -> list[nn.Linear]:
        """The LM head of each head; empty without own LM heads."""
        return [part for head in self for part in head.children() if isinstance(part, nn.Linear)]

    def forward(self, features: Tensor, position_ids: Any = None, mask: Any = None) -> Tensor:
        """Features ``[..., H]`` -> states for the LM heads ``[..., K, H]``."""
        states = []
        for blocks in self.blocks():
            state = features
            for block in blocks:
                state = block(state)
            states.append(state)
        return torch.stack(states, dim=-2)
