"""P-EAGLE: an EAGLE-3 head that predicts all tokens of a draft in one pass (speculators' form of August 2026).

Row i of depth 0 reads what EAGLE-3's does: the target's states at i and the token i + 1. Rows of depth d read the mask
token and a learned state, at position i + d. They see the rows of depth 0 up to i, and those before them of their own
draft. Depth d predicts the token i + 2 + d, so that slots are marginals, as DFlash's: drafts are a chain of independent
draws, or a tree of the likeliest paths.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from drafters.config import Config
from drafters.drafting.grow import Marginals, Slots
from drafters.drafting.tree_plan import TreePlan
from drafters.heads.peagle.forms import PEAGLE_FORMS
from drafters.heads.peagle.module import PEagleHead
from drafters.heads.peagle.shape import PEagleShape
from drafters.learned import LearnedDrafter
from drafters.loop.state import DecodeState
from drafters.methods.block import SlotOptions
from drafters.methods.eagle import Eagle3Features
from drafters.model.runner import model_time
from drafters.model.target import TargetModel


class ParallelFeatures(Eagle3Features):
    """A P-EAGLE head in the loop: it reads true features, and answers with the slots of one pass over mask tokens."""

    def __init__(self, target: TargetModel, module: PEagleHead, options: Any) -> None:
        super().__init__(target, module, options)
        shape = module.shape
        self.depth = options.depth or shape.depths
        masks = torch.full((1, self.depth - 1), shape.mask_token_id, dtype=torch.long)
        self._masks = masks.to(target.device)

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        predicted = self.catch_up(state)
        if self.depth > 1:
            with model_time():
                feature = self.module.masked().expand(state.batch, self.depth - 1, -1)
            rest = self.extend(feature, self._masks.expand(state.batch, -1))
            predicted = torch.cat([predicted, rest], dim=1)
        return Marginals(*self.lm_head.scored(predicted))


class PEagleDrafter(LearnedDrafter):
    """Drafts with a P-EAGLE head.

    Raises:
        ValueError: ``depth`` exceeds the head's, or a d2t that is not increasing or points outside of the vocabulary.
    """

    name = "peagle"
    shape: ClassVar[type[PEagleShape]] = PEagleShape
    module_class = PEagleHead
    options: ClassVar[type[Config]] = SlotOptions
    card_title = "P-EAGLE head ([speculators](https://github.com/vllm-project/speculators))"
    forms = PEAGLE_FORMS
    max_batch = None
    follows = True
    unread: ClassVar = {"chain": ("nodes", "top_k")}

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        head = ParallelFeatures(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, options.shaper(head.module.shape.slots, head.lm_head.width), head.depth - 1)
