"""SpecTr (Sun et al. 2023): k independent drafts of one draft model, verified by K-SEQ.

The drafts are drawn in parallel in one cache and merged into one tree for the target. They are independent, so several
may begin with the same tokens.
"""

import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.drafting.merged_tree import MergedTree
from drafters.loop.acceptance import Rule, Verdict, verify_greedy, verify_sampled
from drafters.loop.sampling import Sampling, draw
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.model.rows import Rows
from drafters.model.target import FeatureOutput, TargetModel

BISECTIONS = 8  # more would raise acceptance by at most about 1e-4


class SpecTrOptions(DraftModelOptions):
    """Options.

    ``gamma``: tokens of a draft.
    ``drafts``: k, number of independent drafts; one if they are greedy, because all would be the same.
    ``draft_temperature``: temperature of the drafts, by default the generation's; greedy decoding can use one above 0.
    """

    gamma: DraftSize = Field(4, ge=1)
    drafts: DraftSize = Field(2, ge=1)
    draft_temperature: float | None = Field(None, ge=0.0)


class SpecTrDrafter(DraftModelDrafter):
    """Draws ``drafts`` independent chains of ``gamma`` tokens. With one chain it is speculative decoding."""

    name = "spectr"
    options = SpecTrOptions
    trees = True
    draft_trees = True
    rewinds = True

    def __init__(self, target: TargetModel, options: SpecTrOptions) -> None:
        super().__init__(target, options)
        self.gamma, self.drafts, self.draft_temperature = options.gamma, options.drafts, options.draft_temperature
        self.max_draft = self.gamma * self.drafts
        # Cache slots are level by level, one per draft, so the slots of a draft are k apart.
        levels = torch.arange(self.gamma, device=target.device)
        self._depths = levels.repeat_interleave(self.drafts)[None]
        self._see = torch.eye(self.drafts, dtype=torch.bool, device=target.device).repeat(1, self.gamma)[None]
        self._shape = (0, 0)  # number of drafts and their tokens, in the latest step

    def rule(self, sampling: Sampling) -> Rule:
        return verify_greedy if sampling.greedy else verify_k_seq

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = min(self.gamma, state.room() - 1)
        if gamma < 1:
            return state.nothing
        features = self._catch_up(state)
        temperature = state.sampling.temperature if self.draft_temperature is None else self.draft_temperature
        sampling = Sampling(temperature, state.sampling.top_k, state.sampling.top_p)
        self._shape = (1 if sampling.greedy else self.drafts, gamma)
        tokens, q = self._draw(features, sampling, state.generator)
        return MergedTree.merge(tokens, None if state.sampling.greedy else self.lm_head.spread(q), state.eos)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        assert isinstance(draft, MergedTree)
        k, gamma = self._shape
        agreed = [draft.shared(index, verdict.rows[0]) for index in range(k)]
        accepted = max(agreed)
        index = agreed.index(accepted)
        # Commit the slots of the accepted draft. Its last token has none.
        self._cache.commit([[level * k + index for level in range(min(accepted, gamma - 1))]])

    def rewind(self, state: DecodeState, length: int) -> None:
        self._cache.crop([min(self._cache.lengths[0], length)])

    def _draw(self, features: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens ``[k, gamma]`` and return them with their distributions q ``[k, gamma, W]``.

        Args:
            features: ``[1, H]`` of the draft model after the last committed token.
        """
        (k, gamma), head = self._shape, self.lm_head
        q_all, tokens = [sampling.probabilities(head(features)).expand(k, -1)], []
        tokens.append(head.tokens(draw(q_all[0], generator)))
        same = tokens[0][:, None] == tokens[0]  # [k, k] drafts with the same tokens so far
        for level in range(1, gamma):
            offset = (level - 1) * k
            see = self._see[:, :, : offset + k] if k > 1 else None
            depths = self._depths[:, : offset + k] if k > 1 else None
            output = self.draft_model.run(tokens[-1][None], self._cache, Rows(see, depths, offset))
            q = sampling.probabilities(head(output.features[0]))
            # K-SEQ needs the same q for drafts with the same tokens; computed in two rows, its last bits may differ.
            q_all.append(q.index_select(0, same.int().argmax(1)) if k > 1 else q)
            tokens.append(head.tokens(draw(q_all[-1], generator)))
            same = same & (tokens[-1][:, None] == tokens[-1])
        return torch.stack(tokens, 1), torch.stack(q_all, 1)


def verify_k_seq(
    draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """K-SEQ (Sun et al. 2023) at every node of the accepted path. Lossless.

    The k drafts through a node propose independent samples x of q. Each passes with probability
    min(1, p(x) / (rho q(x))), and the first that passes is accepted. The drafts with this token continue below it.
    """
    if draft.size == 0:
        return verify_sampled(draft, logits, see, sampling, generator)
    assert isinstance(draft, MergedTree)
    return draft.walk(k_seq, logits, sampling, generator)


def k_seq(draft: MergedTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """Chances ``[U, K]`` of the trials, and residuals of ``p [U, V]``, see ``Trials``.

    The residual is p - min(q, p / rho) p_acc / beta, where beta = sum_x min(q, p / rho) is the probability that one
    draft passes, and p_acc = 1 - (1 - beta)^k that one of k drafts does. It is not negative, as rho >= p_acc / beta.
    """
    assert draft.q is not None
    q = draft.q[0, draft.q_rows[:, 0]]
    k = (draft.children >= 0).sum(1, keepdim=True)
    rho = torch.ones_like(p[:, :1])
    several = sum(number > 1 for number in draft.trials)  # these nodes come first; a single draft has rho = 1
    if several:
        rho[:several] = solve_rho(p[:several], q[:several], k[:several])
    x = draft.tokens[0, draft.children.clamp_min(0)]
    chances = (p.gather(1, x) / (rho * q.gather(1, x))).masked_fill(draft.children < 0, 0.0)
    passing = torch.minimum(q, p / rho)
    left = (p - passing * _gain(passing.sum(1, keepdim=True), k)).clamp_min_(0.0)
    # The residual is 0 only if p == q, where only rounding can reject.
    return chances, torch.where(left.sum(1, keepdim=True) > 0, left, p)


def solve_rho(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return rho* ``[U, 1]`` in [1, k], the root of 1 - (1 - beta)^k = rho beta, or slightly more.

    Bisection on rho = G(rho) with G = p_acc / beta. Every rho >= G(rho) is valid, and the smallest accepts most. G
    increases, so G(rho) is between rho and the root, and an end can move to G(middle) instead of the middle. The upper
    end is always valid.

    Args:
        p: ``[U, V]`` the target's distributions.
        q: ``[U, V]`` the draft model's.
        k: ``[U, 1]`` number of drafts at each node.
    """
    low, high = torch.ones_like(p[:, :1]), k.to(p.dtype)
    for _ in range(BISECTIONS):
        middle = low.lerp(high, 0.5)
        gain = _gain(torch.minimum(q, p / middle).sum(1, keepdim=True), k)
        valid = gain <= middle
        low, high = torch.where(valid, low, gain), torch.where(valid, gain, high)
    return high.clamp_min(1.0)


def _gain(beta: Tensor, k: Tensor) -> Tensor:
    """p_acc / beta = (1 - (1 - beta)^k) / beta; k for beta = 0."""
    minus_beta = -beta.clamp(torch.finfo(beta.dtype).tiny, 1.0)
    return torch.expm1(k * torch.log1p(minus_beta)) / minus_beta
