"""Speculative decoding with a draft model (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.drafting.head import in_parts
from drafters.drafting.tree_plan import chain_plan
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState, last_of, padded
from drafters.loop.tree import DraftTree
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import ShapePolicy

LONGEST = 12  # tokens that gamma: auto drafts


class SpeculativeOptions(DraftModelOptions):
    """Options.

    ``gamma``: tokens of a draft; auto drafts as many as are profitable by step costs and acceptance, 0 to 12.
    """

    gamma: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = 4


class SpeculativeDrafter(DraftModelDrafter):
    """Drafts a chain of ``gamma`` tokens, each drawn from the draft model's distribution q."""

    name = "speculative"
    options: ClassVar[type[SpeculativeOptions]] = SpeculativeOptions
    max_batch: ClassVar[int | None] = None
    rewinds = True
    follows = True

    def __init__(self, target: TargetModel, options: SpeculativeOptions) -> None:
        super().__init__(target, options)
        self.policy: ShapePolicy | None = ShapePolicy(LONGEST, LONGEST, 1) if options.gamma == "auto" else None
        self.gamma = self.max_draft = LONGEST if options.gamma == "auto" else options.gamma

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = state.longest_draft(self.gamma)
        if self.policy is not None:
            gamma = min(gamma, len(self.policy.paths(state)))
        if not gamma:  # the draft model reads the committed tokens before it drafts again
            return state.nothing
        self.lm_head.read(state.tokens)
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        # The draft model first reads the root and, after full acceptance, the last draft token.
        state.empty_finished(self._cache)
        texts = zip(state.tokens, self._cache.lengths, state.finished, strict=True)
        *before, counts = in_parts([0 if done else len(row) - known for row, known, done in texts], self._cache)
        for part in before:
            self._advance(self._unread(state, part), part)
        rows = self._unread(state, counts)
        for _ in range(gamma):
            logits = self._advance(rows, counts)
            rows = self.lm_head.tokens(state.sampling.pick(logits, state.generator, q))[:, None]
            tokens.append(rows)
            counts = [1] * state.batch
        return DraftTree.chain(torch.cat(tokens, 1), q=self.lm_head.spread(torch.stack(q, 1)) if q else None)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        texts = zip(self._cache.lengths, state.tokens, strict=True)
        self._cache.crop([min(known, len(tokens) - 1) for known, tokens in texts])
        if self.policy is not None and draft.size:
            self.policy.learn(chain_plan(draft.size, self.target.device), draft.size, state, verdict)

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        """Nothing to do: ``propose`` reads the tokens that the draft model has not read."""

    def rewind(self, state: DecodeState, length: int) -> None:
        self._cache.crop([min(self._cache.lengths[0], length)])

    def _unread(self, state: DecodeState, counts: list[int]) -> Tensor:
        """The next ``counts`` tokens ``[B, R]`` of each sequence that the draft model has not read."""
        rows = zip(state.tokens, self._cache.lengths, counts, strict=True)
        return padded([tokens[known : known + count] for tokens, known, count in rows], self.target.device)

    def _advance(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run the draft model over the first ``counts[b]`` tokens of ``rows [B, R]``; logits ``[B, W]`` after them."""
        features = self.draft_model.run(rows, self._cache).features
        self._cache.commit_first(counts)
        return self.lm_head(last_of(features, counts))
