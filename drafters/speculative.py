"""Speculative decoding with a draft model (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .decoding.acceptance import Verdict
from .decoding.draft_tree import DraftTree
from .decoding.loop import DecodeState, last_of, padded
from .drafting.draft_model import DraftModelDrafter, DraftModelOptions
from .model.target import FeatureOutput, TargetModel


class SpeculativeOptions(DraftModelOptions):
    """``gamma``: tokens a draft."""

    gamma: int = Field(4, ge=1)


class SpeculativeDrafter(DraftModelDrafter):
    """Drafts ``gamma`` tokens one by one from a draft model's distribution q.

    Raises:
        ValueError: the draft model's vocabulary differs from the target's.
    """

    name = "speculative"
    options: ClassVar[type[SpeculativeOptions]] = SpeculativeOptions
    max_batch: ClassVar[int | None] = None
    rewinds = True

    def __init__(self, target: TargetModel, options: SpeculativeOptions) -> None:
        super().__init__(target, options)
        self.gamma = self.max_draft = options.gamma

    def propose(self, state: DecodeState) -> DraftTree:
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        # The draft model catches up first: with the root, and after full acceptance with the last draft token.
        pending = [row[known:] for row, known in zip(state.tokens, self._cache.lengths, strict=True)]
        rows, counts = padded(pending, self.target.device), [len(row) for row in pending]
        for _ in range(state.longest_draft(self.gamma)):
            logits = self._advance(rows, counts)
            rows = self.lm_head.tokens(state.sampling.pick(logits, state.generator, q))[:, None]
            tokens.append(rows)
            counts = [1] * state.batch
        if not tokens:
            return DraftTree.empty(state.batch, self.target.device)
        return DraftTree.chain(torch.cat(tokens, 1), q=self.lm_head.spread(torch.stack(q, 1)) if q else None)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        lengths = zip(self._cache.lengths, state.tokens, strict=True)
        self._cache.crop([min(length, len(tokens) - 1) for length, tokens in lengths])

    def rewind(self, state: DecodeState, kept: int) -> None:
        self._cache.crop([min(self._cache.lengths[0], kept)])

    def _advance(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run the draft model over the first ``counts[b]`` of ``rows [B, R]``; logits of ``lm_head`` after them."""
        features = self.draft_model.run(rows, self._cache).features
        self._cache.commit_first(counts)
        return self.lm_head(last_of(features, counts))
