"""Multi-token joint greedy decoding (MJGD: Qin et al. 2024, section 3.1). Lossy by design.

The next K tokens are those of the highest joint likelihood under the target; K = 1 is plain decoding. It accelerates
nothing: K target forwards, over M hypotheses each, give K tokens. It is what MJSD approximates, and here to compare.
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
    """``k``: tokens chosen together (gamma_i in Definition 3.1, K in Figure 1). ``beams``: hypotheses kept by the beam
    search that approximates the argmax; vocabulary^(k - 1) of them make it exact."""

    k: DraftSize = Field(4, ge=1)
    beams: DraftSize = Field(8, ge=1)


class MJGDDrafter(Drafter):
    """Beam search with the target itself.

    ``propose`` searches for the likeliest beginnings of K - 1 tokens, in scratch rows of the target's cache. The loop's
    own forward over all of them gives the K-th token, and the rule takes the likeliest whole.

    Sampling (temperature above 0) extends each hypothesis by tokens drawn without replacement from the warped
    distribution, and draws one last token for each; of those the one of highest joint likelihood is taken.
    """

    name = "mjgd"
    options = MJGDOptions
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
    """Hypotheses as branches that part at the root: one row of nodes after the other, with their ``log_q``."""
    beams, length = paths.tokens.shape
    valid = until_end(paths.tokens, eos)
    return DraftTree.from_parents(
        paths.tokens.reshape(1, -1),
        [ROOT if node % length == 0 else node - 1 for node in range(beams * length)],
        valid=valid.reshape(1, -1) if valid is not None else None,
        extra=Extra(log_q=paths.log_p.reshape(1, -1)),
    )


class JointMaximum:
    """Accept the branch that, with the target's next token after it, has the highest joint likelihood.

    Attributes:
        eos: where hypotheses end. One that ended needs no next token, and none is charged to it.
    """

    def __init__(self, eos: frozenset[int] = frozenset()) -> None:
        self.eos = eos

    def __call__(
        self,
        draft: DraftTree,
        logits: Tensor,
        see: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        """The verdict on branches of one length with ``log_q``, their log-likelihoods under the target itself.

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
        if draft.valid is not None:  # back to the EOS of a branch that ended, whose nodes lie in a row
            best = best - (see[torch.arange(len(best), device=best.device), best, 1:] & ~draft.valid).sum(-1)
        return collect(draft, see, best, token.gather(1, best[:, None])[:, 0])
