"""Big Little Decoder (BiLD: Kim et al. 2023). Lossy by design.

The draft model drafts while it is confident (the fallback policy), and the target rejects tokens that it finds too
unlikely (the rollback policy). All other tokens are the draft model's choice.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.loop.acceptance import Rule, Verdict, collect
from drafters.loop.sampling import Sampling, draw
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.speculative import SpeculativeDrafter, SpeculativeOptions
from drafters.model.target import TargetModel


class BiLDOptions(SpeculativeOptions):
    """Options; the defaults are those of MJSD's experiments (Qin et al. 2024, Table 5).

    ``gamma``: most tokens of a draft.
    ``fallback``: tau_1, drafting stops when the draft model's top probability is below it; 0 never stops.
    ``rollback``: tau_2, the target rejects from the first token on whose negative log-likelihood (nats) is above it.
    """

    gamma: DraftSize = Field(10, ge=1)
    fallback: float = Field(0.9, ge=0.0, le=1.0)
    rollback: float = Field(2.0, gt=0.0)


class BiLDDrafter(SpeculativeDrafter):
    """Drafts like speculative decoding, but stops before the first uncertain token, which the target then chooses."""

    name = "bild"
    options: ClassVar[type[SpeculativeOptions]] = BiLDOptions
    lossless = False
    max_batch = 1
    rewinds = False  # a cascade needs samples of a known q, and BiLD's output follows none

    def __init__(self, target: TargetModel, options: BiLDOptions) -> None:
        super().__init__(target, options)
        self.fallback, self.rollback = options.fallback, options.rollback

    def rule(self, sampling: Sampling) -> Rule:
        return Rollback(self.rollback)

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = min(self.gamma, state.room() - 1)
        self.lm_head.read(state.tokens)
        tokens: list[Tensor] = []
        rows = torch.tensor([state.tokens[0][self._cache.lengths[0] :]], device=self.target.device)
        for _ in range(gamma):
            logits = self._advance(rows, [rows.shape[1]])
            confidence, rows = logits.softmax(-1, dtype=torch.float32).max(-1, keepdim=True)
            # Reads one value per draft token, because the next forward pass depends on it.
            if confidence.item() < self.fallback:
                break
            if not state.sampling.greedy:
                rows = draw(state.sampling.probabilities(logits), state.generator)[:, None]
            rows = self.lm_head.tokens(rows)
            tokens.append(rows)
        return DraftTree.chain(torch.cat(tokens, 1)) if tokens else state.nothing


class Rollback:
    """Acceptance rule: accept the tokens before the first with -log p(x) > tau_2, then add a token of the target.

    Args:
        rollback: tau_2, in nats.
    """

    def __init__(self, rollback: float) -> None:
        self.rollback = rollback

    def __call__(
        self, draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Verdict:
        """The verdict on a chain; ``logits [B, N+1, V]`` of [root, nodes]."""
        assert draft.is_chain
        log_p = logits[:, :-1].log_softmax(-1, dtype=torch.float32).gather(2, draft.tokens[..., None])[..., 0]  # [B, N]
        best = (-log_p <= self.rollback).long().cumprod(1).sum(1)
        after = logits[torch.arange(len(best), device=logits.device), best]
        return collect(draft, see, best, sampling.pick(after, generator))
