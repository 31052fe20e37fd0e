"""DFlash2 (z-lab, August 2026, inco.ai/blog/dflash2): DFlash whose slots choose among a few candidates, left to right.

One pass over the block gives the ``selector_top_k`` likeliest tokens of every slot. The selector scores these by the
token before the slot, from the anchor on, and the backbone still runs once. Drafts are drawn from the softmax of these
scores, which is the exact q: other tokens have probability 0. A tree scores each path on its own.
"""

from typing import ClassVar

import torch
from torch import Tensor

from drafters.drafting.grow import Slots, top_logit
from drafters.heads.dflash2.forms import DFLASH2_FORMS
from drafters.heads.dflash2.module import CandidateSelector, DFlash2Head
from drafters.heads.dflash2.shape import DFlash2Shape
from drafters.loop.state import DecodeState
from drafters.methods.block import BlockDrafter, BlockHead
from drafters.model.runner import model_time


class SelectorBlock(BlockHead):
    """A DFlash2 head in the loop."""

    @property
    def choices(self) -> int:
        return min(int(self.module.shape.selector_top_k), self.lm_head.width)

    def scored(self, states: Tensor, state: DecodeState) -> Slots:
        selector, scores = self.module.candidate_selector, self.lm_head.scored(states)
        return SelectorSlots(selector, scores.logits, states, state.roots, self.choices, scores.places, scores.among)


class SelectorSlots(Slots):
    """Slots whose candidates the selector scores by the token before.

    Args:
        logits: ``[B, D, V]`` of the LM head. states: ``[B, D, H]`` of the slots.
        anchors: ``[B, 1]``, the last committed tokens. count: candidates of a slot.
        places: ``[B, D, n]`` of the logits among ``among`` tokens; None: they are of all V.
    """

    def __init__(
        self,
        selector: CandidateSelector,
        logits: Tensor,
        states: Tensor,
        anchors: Tensor,
        count: int,
        places: Tensor | None = None,
        among: int = 0,
    ) -> None:
        self._selector, self._states, self._previous = selector, states, anchors
        self._unary, chosen = logits.topk(count, dim=-1)  # [B, D, k]
        self._candidates = chosen if places is None else places.gather(-1, chosen)
        self._width = among or logits.shape[-1]
        self._scored: list[Tensor] = []

    def logits(self, depth: int) -> Tensor:
        """Scores ``[B, n, V]`` of the children of n nodes, -inf for tokens that are no candidates of the slot."""
        slot = slice(depth, depth + 1)
        candidates = self._candidates[:, slot]
        with model_time():
            scores = self._selector(self._unary[:, slot], candidates, self._states[:, slot], self._previous)
        every = scores.new_full((*scores.shape[:2], self._width), -torch.inf)
        self._scored.append(every.scatter_(-1, candidates.expand_as(scores), scores))
        return every

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        self._previous = tokens

    def certainty(self) -> Tensor:
        return top_logit(torch.cat(self._scored, dim=1))


class DFlash2Drafter(BlockDrafter):
    """Drafts each token among its slot's candidates, given the one before it."""

    name = "dflash2"
    shape: ClassVar[type[DFlash2Shape]] = DFlash2Shape
    module_class = DFlash2Head
    head_class = SelectorBlock
    card_title = "DFlash2 head ([DFlash2](https://inco.ai/blog/dflash2))"
    forms = DFLASH2_FORMS
