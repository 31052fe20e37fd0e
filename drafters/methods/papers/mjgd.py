"""Multi-token joint greedy decoding (MJGD: Qin et al. 2024, section 3.1). Lossy by design.

The next K tokens are those of the highest joint likelihood under the target; K = 1 is plain decoding. It is a baseline
for MJSD, which approximates it, and no acceleration: K target forwards over M hypotheses each give K tokens.
"""

import torch
from pydantic import Field
from torch import Tensor

from drafters.base import Drafter
from drafters.config import Config, DraftSize
from drafters.drafting.beam_search import Paths, beam_search, is_end, trace_back, until_end
from drafters.loop.acceptance import Rule, Verdict, collect
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree, Extra
from drafters.model.draft_head import DraftHead
from drafters.model.target import FeatureOutput, TargetModel


class MJGDOptions(Config):
    """Options.

    ``k``: number of tokens that are chosen jointly (gamma_i in Definition 3.1, K in Figure 1).
    ``beams``: beams of the search that approximates the argmax; vocabulary^(k - 1) beams make it exact.
    """

    k: DraftSize = Field(4, ge=1)
    beams: DraftSize = Field(8, ge=1)


class MJGDDrafter(Drafter):
    """Beam search with the target.

    ``propose`` searches for the likeliest K - 1 tokens, in uncommitted slots of the target's cache. The loop's forward
    over all hypotheses gives the K-th token of each, and the rule accepts the hypothesis of highest joint likelihood.
    When sampling, hypotheses are extended by draws without replacement, and the K-th token is a draw.
    """

    name = "mjgd"
    options = MJGDOptions
    trees = True
    lossless = False

    def __init__(self, target: TargetModel, options: MJGDOptions) -> None:
        super().__init__(target, options)
        self.k, self.beams, self.max_draft = options.k, options.beams, options.beams * (options.k - 1)
        self._rule, self._lm_head = JointMaximum(), DraftHead(target)

    def rule(self, sampling: Sampling) -> Rule:
        return self._rule

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._rule.eos = state.eos

    def propose(self, state: DecodeState) -> DraftTree:
        length = min(self.k, state.room()) - 1
        if length == 0:
            return state.nothing
        root = self.target.run(state.roots, state.cache).features[:, -1]
        models, how = (self.target, self._lm_head, state.cache), (state.sampling, state.eos, state.generator)
        levels = beam_search(*models, root, length, self.beams, *how, offset=1)
        every = torch.arange(len(levels[-1].tokens), device=self.target.device)
        draft = side_by_side(trace_back(levels, every), state.eos)
        draft.extra.target_forwards = length
        return draft


def side_by_side(paths: Paths, eos: frozenset[int]) -> DraftTree:
    """The draft with one branch from the root per hypothesis, one after the other, with their ``log_q``."""
    beams, length = paths.tokens.shape
    valid = until_end(paths.tokens, eos)
    return DraftTree.from_parents(
        paths.tokens.reshape(1, -1),
        [ROOT if node % length == 0 else node - 1 for node in range(beams * length)],
        valid=valid.reshape(1, -1) if valid is not None else None,
        extra=Extra(log_q=paths.log_p.reshape(1, -1)),
    )


class JointMaximum:
    """Acceptance rule: accept the branch with the highest joint likelihood, the target's next token included.

    Attributes:
        eos: tokens that end a branch. After EOS, the next token has likelihood 1.
    """

    def __init__(self, eos: frozenset[int] = frozenset()) -> None:
        self.eos = eos

    def __call__(
        self, draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Verdict:
        """The verdict on branches of one length; ``log_q`` holds the target's own log-likelihoods.

        Args:
            logits: ``[B, N+1, V]`` of [root, nodes].
            see: ``[B, N+1, N+1]`` ancestor mask.
        """
        token = sampling.pick(logits, generator)
        score = logits.log_softmax(-1, dtype=torch.float32).gather(2, token[..., None])[..., 0]
        if draft.size:
            assert draft.extra.log_q is not None
            if self.eos:
                score[:, 1:] = score[:, 1:].masked_fill(is_end(draft.tokens, self.eos), 0.0)
            score = score + torch.where(see[:, :, 1:], draft.extra.log_q[:, None], 0.0).sum(-1)
            depths = draft.depths(see)
            score = score.masked_fill(depths < depths.amax(), -torch.inf)
        best = score.argmax(-1)
        if draft.valid is not None:  # go back to the EOS of a branch that ended; a branch's nodes are consecutive
            best = best - (see[torch.arange(len(best), device=best.device), best, 1:] & ~draft.valid).sum(-1)
        return collect(draft, see, best, token.gather(1, best[:, None])[:, 0])
