"""Module of a P-EAGLE head (P-EAGLE; speculators' form of August 2026)."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.heads.eagle3.module import Eagle3Head
from drafters.heads.peagle.shape import PEagleShape


class PEagleHead(Eagle3Head):
    """EAGLE-3's module and ``mask_hidden`` ``[1, 1, taps * H]``, which replaces the target's states at depths above 0.

    Raises:
        ValueError: as ``Eagle3Head``, or the mask token is no token of the target.
    """

    shape: PEagleShape

    def __init__(self, target_config: PretrainedConfig, shape: PEagleShape) -> None:
        super().__init__(target_config, shape)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def masked(self) -> Tensor:
        """The feature at depths above 0, ``[1, 1, H]``."""
        return self.fused(self.mask_hidden)
