"""SpecInfer (Miao et al. 2023): several draft models speculate one sequence each; the merged tree is verified at once.

Greedy decoding uses the loop's own rule (VerifyGreedy); sampling uses multi-step speculative sampling
(VerifyStochastic). The draft models can be boost-tuned: model k is trained on texts that those before it got wrong.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from drafters.base import Drafter
from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModel
from drafters.drafting.merged_tree import MergedTree
from drafters.loop.acceptance import Rule, Verdict, verify_greedy, verify_sampled
from drafters.loop.sampling import Sampling, residual
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.speculative import SpeculativeDrafter, SpeculativeOptions
from drafters.model.draft_head import DraftHeadOptions
from drafters.model.target import FeatureOutput, TargetModel


class SpecInferOptions(DraftHeadOptions):
    """Options.

    ``draft_models``: folders or Hub repositories of smaller LMs of the target's tokenizer.
    ``gamma``: tokens that each of them drafts.
    """

    draft_models: list[DraftModel] = Field(min_length=1)
    gamma: DraftSize = Field(4, ge=1)


class SpecInferDrafter(Drafter):
    """Merges the sequences of several draft models. With one draft model it is speculative decoding."""

    name = "specinfer"
    options = SpecInferOptions
    trees = True
    rewinds = True

    def __init__(self, target: TargetModel, options: SpecInferOptions) -> None:
        super().__init__(target, options)
        self.gamma = options.gamma
        common = {key: getattr(options, key) for key in ("gamma", *DraftHeadOptions.model_fields)}
        speculators = [SpeculativeOptions(draft_model=model, **common) for model in options.draft_models]
        self.speculators = [SpeculativeDrafter(target, each) for each in speculators]
        self.max_draft = self.gamma * len(self.speculators)
        self.max_context = min(speculator.max_context for speculator in self.speculators)
        self._known = 0  # committed tokens when the draft began

    def rule(self, sampling: Sampling) -> Rule:
        return verify_greedy if sampling.greedy else verify_stochastic

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        for speculator in self.speculators:
            speculator.begin(state, output)

    def propose(self, state: DecodeState) -> DraftTree:
        self._known = len(state.tokens[0])
        drafts = [speculator.propose(state) for speculator in self.speculators]
        if not drafts[0].size:
            return drafts[0]
        q = [draft.q for draft in drafts if draft.q is not None]
        return MergedTree.merge(torch.cat([draft.tokens for draft in drafts]), torch.cat(q) if q else None, state.eos)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        assert isinstance(draft, MergedTree)
        for index, speculator in enumerate(self.speculators):
            # Each model keeps the part of its own draft that is on the accepted path.
            speculator.rewind(state, self._known + draft.shared(index, verdict.rows[0]))

    def rewind(self, state: DecodeState, length: int) -> None:
        for speculator in self.speculators:
            speculator.rewind(state, length)


def verify_stochastic(
    draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """VerifyStochastic (lines 24 to 43 of the algorithm): multi-step speculative sampling. Lossless.

    At a node u, the models whose sequences contain u are tried in random order. The token of model s passes with
    probability min(1, p(x_s) / q_s(x_s)); otherwise p <- norm(max(0, p - q_s)). If none passes, the bonus is drawn from
    the remaining p. Two models with the same token are two trials with their own q_s. If either passes, both sequences
    continue below it.
    """
    if draft.size == 0:
        return verify_sampled(draft, logits, see, sampling, generator)
    assert isinstance(draft, MergedTree)
    keys = torch.rand(draft.children.shape, dtype=torch.float32, device=logits.device, generator=generator)
    order = keys.masked_fill_(draft.children < 0, torch.inf).argsort(1)
    shuffled = replace(draft, children=draft.children.gather(1, order), q_rows=draft.q_rows.gather(1, order))
    return shuffled.walk(run_trials, logits, sampling, generator)


def run_trials(draft: MergedTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """Chances ``[U, K]`` of the trials, and residuals of ``p [U, V]``, see ``Trials``.

    The first trials of all nodes run in parallel, then the second ones of nodes with two or more, and so on.
    """
    chances = p.new_zeros(draft.children.shape)
    left = p.clone()
    for trial in range(chances.shape[1]):
        n = sum(number > trial for number in draft.trials)
        assert draft.q is not None
        q_s = draft.q[0, draft.q_rows[:n, trial]]
        x_s = draft.tokens[0, draft.children[:n, trial]][:, None]
        chances[:n, trial] = (left[:n].gather(1, x_s) / q_s.gather(1, x_s))[:, 0]
        left[:n] = residual(left[:n], q_s)
    return chances, left
