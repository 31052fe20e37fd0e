"""Multi-token joint speculative decoding (MJSD: Qin et al. 2024, section 3.2 and Algorithm 1). Lossy by design.

Drafts come from a beam search with the draft model. The longest prefix whose joint likelihood under the target is high
enough is accepted, also if a shorter prefix fails.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.beam_search import beam_search, trace_back, until_end
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.loop.acceptance import Rule, Verdict, collect
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.model.target import FeatureOutput, TargetModel


class MJSDOptions(DraftModelOptions):
    """Options; the defaults are the paper's (Appendix D, Table 5).

    ``gamma``: tokens of a draft.
    ``beams``: beams of the search.
    ``threshold``: ratio of joint likelihoods, target to draft model, above which a prefix is accepted; 0 accepts every
    draft, 1 none.
    ``likelihood``: distributions of the joint likelihoods when sampling: own are the models' (section 3.2, Algorithm
    1), warped those that tokens are drawn from (footnote 5, and the experiments of Appendix D).
    """

    gamma: DraftSize = Field(4, ge=1)
    beams: DraftSize = Field(8, ge=1)
    threshold: float = Field(0.1, ge=0.0, le=1.0)
    likelihood: Literal["own", "warped"] = "own"


class MJSDDrafter(DraftModelDrafter):
    """Beam search with the draft model (section 2.1); the best beam is verified by joint likelihood.

    The last token of every step is the target's, its argmax or a draw.
    """

    name = "mjsd"
    options = MJSDOptions
    lossless = False
    draft_trees = True

    def __init__(self, target: TargetModel, options: MJSDOptions) -> None:
        super().__init__(target, options)
        self.gamma, self.beams, self.threshold = options.gamma, options.beams, options.threshold
        self.max_draft = self.gamma
        self.warped = options.likelihood == "warped"
        self.more_rows = self.gamma * self.beams  # all beams are in one cache, as a tree
        self._rows: Tensor  # [gamma] draft cache slots of the drafted tokens, on the host

    def rule(self, sampling: Sampling) -> Rule:
        return JointLikelihood(self.threshold, self.warped)

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = min(self.gamma, state.room() - 1)
        if gamma < 1:
            return state.nothing
        features = self._catch_up(state)
        how = state.sampling, state.eos, state.generator
        models = self.draft_model, self.lm_head, self._cache
        levels = beam_search(*models, features, gamma, self.beams, *how, warped=self.warped)
        best = trace_back(levels, levels[-1].score.argmax()[None])
        self._rows = best.rows[0].to("cpu", non_blocking=True)  # the verdict's copy waits for it
        draft = DraftTree.chain(best.tokens, valid=until_end(best.tokens, state.eos))
        draft.extra.log_q = best.log_p
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if draft.size:
            accepted = min(len(verdict.rows[0]) - 1, draft.size - 1)  # the last draft token has no slot
            self._cache.commit([self._rows[:accepted].tolist()])


class JointLikelihood:
    """Acceptance rule: accept the longest prefix x_1..j with min(1, p(x_1..j) / q(x_1..j)) > threshold (Algorithm 1).

    A shorter prefix may fail. (Line 11 of the algorithm sets eta to j; the index i is meant.)

    Args:
        threshold: least ratio, not included.
        warped: when sampling, p is the warped distribution, as q is; otherwise the target's own.
    """

    def __init__(self, threshold: float, warped: bool = False) -> None:
        self.log_threshold = math.log(threshold) if threshold > 0 else -math.inf
        self.warped = warped

    def __call__(
        self, draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Verdict:
        """The verdict on a chain with ``log_q``; ``logits [B, N+1, V]`` of [root, nodes]."""
        batch, n = draft.tokens.shape
        best = torch.zeros(batch, dtype=torch.long, device=logits.device)
        if n:
            assert draft.is_chain and draft.extra.log_q is not None
            before = logits[:, :-1]
            warped = self.warped and not sampling.greedy
            log_p = sampling.probabilities(before).log() if warped else before.log_softmax(-1, dtype=torch.float32)
            log_p = log_p.gather(2, draft.tokens[..., None])[..., 0]
            ratio = (log_p.cumsum(1) - draft.extra.log_q.cumsum(1)).clamp_max(0.0)
            passes = ratio > self.log_threshold
            if draft.valid is not None:
                passes = passes & draft.valid
            index = torch.arange(1, n + 1, device=logits.device)
            best = torch.where(passes, index, 0).amax(1)
        after = logits[torch.arange(batch, device=logits.device), best]
        return collect(draft, see, best, sampling.pick(after, generator))
