"""Multi-token joint speculative decoding (MJSD: Qin et al. 2024, section 3.2 and Algorithm 1). Lossy by design.

It gives up the target's distribution token by token for text of a higher joint likelihood: drafts come from a beam
search, and the longest prefix that the target finds jointly likely enough is accepted, even past a
shorter one that fails.
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

    ``gamma``: tokens a draft. ``beams``: hypotheses kept by the beam search. ``threshold``: the least ratio of joint
    likelihoods, target to draft model, that is accepted; 0 accepts every draft, 1 none. ``likelihood``: by which
    distributions beams and ratio go: ``own``, the models' themselves (section 3.2, Algorithm 1), or ``warped``, those
    that tokens are drawn from: "also valid" (footnote 5), and what the paper's experiments have, at temperature 1,
    top-k 20 and top-p 0.9 (Appendix D). It makes a difference where tokens are sampled only.
    """

    gamma: DraftSize = Field(4, ge=1)
    beams: DraftSize = Field(8, ge=1)
    threshold: float = Field(0.1, ge=0.0, le=1.0)
    likelihood: Literal["own", "warped"] = "own"


class MJSDDrafter(DraftModelDrafter):
    """Beam search with the draft model; the best beam is verified by joint likelihood.

    Greedy decoding extends each beam by its most likely tokens, sampling by tokens drawn without replacement from the
    draft model's distribution, warped as the generation says; in both the hypotheses of highest joint likelihood are
    kept (section 2.1). The last token of every step is the target's, greedy or drawn in the same way.

    Raises:
        ValueError: the draft model has another tokenizer than the target.
    """

    name = "mjsd"
    options = MJSDOptions
    lossless = False

    def __init__(self, target: TargetModel, options: MJSDOptions) -> None:
        super().__init__(target, options)
        self.gamma, self.beams, self.threshold = options.gamma, options.beams, options.threshold
        self.max_draft = self.gamma
        self.warped = options.likelihood == "warped"
        # Beams lie side by side in one cache, as a tree; the last level's tokens get no row.
        self.more_rows = self.gamma * self.beams
        self._rows: Tensor  # [gamma] draft cache rows of the drafted tokens, on the host

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
        self._rows = best.rows[0].to("cpu", non_blocking=True)  # there with the verdict, without a wait of its own
        draft = DraftTree.chain(best.tokens, valid=until_end(best.tokens, state.eos))
        draft.extra.log_q = best.log_p
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if draft.size:
            accepted = min(len(verdict.rows[0]) - 1, draft.size - 1)  # the last draft token has no row
            self._cache.commit([self._rows[:accepted].tolist()])


class JointLikelihood:
    """Accept the longest prefix x_1..j with min(1, p(x_1..j) / q(x_1..j)) > threshold, even past a failing shorter one.

    Then one token of the target (Algorithm 1). Its line 11 sets eta to j, a token id: the index i is meant.

    Args:
        warped: whether p is the distribution that the target's tokens are drawn from, as q then is, too; else its own.
    """

    def __init__(self, threshold: float, warped: bool = False) -> None:
        self.log_threshold = math.log(threshold) if threshold > 0 else -math.inf
        self.warped = warped

    def __call__(
        self,
        draft: DraftTree,
        logits: Tensor,
        see: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None = None,
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
