"""SpecTr (Sun et al. 2023): k independent drafts of one draft model, verified by K-SEQ.

The k drafts are drawn independently, so two of them may begin alike: that costs diversity but keeps the rule simple and
lossless. They are drafted side by side in one cache and merged into one tree for the target.
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

BISECTIONS = 8  # they cost 1e-4 of acceptance, mostly less


class SpecTrOptions(DraftModelOptions):
    """Options.

    ``gamma``: tokens a draft. ``drafts``: k, the independent drafts. ``draft_temperature``: of q, by default the
    generation's own. At temperature 0 the k drafts would be one and the same chain, and only one is drafted; a
    ``draft_temperature`` above 0 gives a greedy target k different ones, verified greedily.
    """

    gamma: DraftSize = Field(4, ge=1)
    drafts: DraftSize = Field(2, ge=1)
    draft_temperature: float | None = Field(None, ge=0.0)


class SpecTrDrafter(DraftModelDrafter):
    """Draws ``drafts`` independent chains of ``gamma`` tokens; with one of them it is speculative decoding.

    Raises:
        ValueError: the draft model has another tokenizer than the target.
    """

    name = "spectr"
    options = SpecTrOptions
    rewinds = True

    def __init__(self, target: TargetModel, options: SpecTrOptions) -> None:
        super().__init__(target, options)
        self.gamma, self.drafts, self.draft_temperature = options.gamma, options.drafts, options.draft_temperature
        self.max_draft = self.gamma * self.drafts
        # Level by level, a row of each draft: it sees the rows of its own draft, every drafts-th one.
        levels = torch.arange(self.gamma, device=target.device)
        self._depths = levels.repeat_interleave(self.drafts)[None]
        self._see = torch.eye(self.drafts, dtype=torch.bool, device=target.device).repeat(1, self.gamma)[None]
        self._shape = (0, 0)  # drafts, tokens of the last one

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
        # A draft's last token has no row.
        self._cache.commit([[level * k + index for level in range(min(accepted, gamma - 1))]])

    def rewind(self, state: DecodeState, kept: int) -> None:
        self._cache.crop([min(self._cache.lengths[0], kept)])

    def _draw(self, features: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens ``[k, gamma]`` and what they were drawn from, q ``[k, gamma, width]``; nothing is copied to the host.

        Args:
            features: ``[1, H]`` of the draft model after the last committed token.
        """
        (k, gamma), head = self._shape, self.lm_head
        q_all, tokens = [sampling.probabilities(head(features)).expand(k, -1)], []
        tokens.append(head.tokens(draw(q_all[0], generator)))
        alike = tokens[0][:, None] == tokens[0]  # drafts with the same tokens so far
        for level in range(1, gamma):
            offset = (level - 1) * k
            see = self._see[:, :, : offset + k] if k > 1 else None
            depths = self._depths[:, : offset + k] if k > 1 else None
            output = self.draft_model.run(tokens[-1][None], self._cache, Rows(see, depths, offset))
            q = sampling.probabilities(head(output.features[0]))
            # Of two rows with one context the last bits may differ, and K-SEQ wants drafts of one and the same q.
            q_all.append(q.index_select(0, alike.int().argmax(1)) if k > 1 else q)
            tokens.append(head.tokens(draw(q_all[-1], generator)))
            alike = alike & (tokens[-1][:, None] == tokens[-1])
        return torch.stack(tokens, 1), torch.stack(q_all, 1)


def verify_k_seq(
    draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """K-SEQ (Sun et al. 2023) at every node on the way: the target's distribution is preserved.

    The k drafts through a node propose independent samples x of q; the first that passes is accepted, each with
    probability min(1, p(x) / (rho q(x))). The drafts that share the accepted token go on together.
    """
    if draft.size == 0:
        return verify_sampled(draft, logits, see, sampling, generator)
    assert isinstance(draft, MergedTree)
    return draft.walk(k_seq, logits, sampling, generator)


def k_seq(draft: MergedTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """The chances ``[U, K]`` of the nodes' trials, and what is left of ``p [U, V]`` where all fail.

    That is p - min(q, p / rho) p_acc / beta, with beta = sum_x min(q, p / rho) the probability that one draft passes
    and p_acc = 1 - (1 - beta)^k that one of k does. It is nowhere negative, for rho >= p_acc / beta.
    """
    assert draft.q is not None
    q = draft.q[0, draft.q_rows[:, 0]]
    k = (draft.children >= 0).sum(1, keepdim=True)
    rho = torch.ones_like(p[:, :1])
    several = sum(number > 1 for number in draft.trials)  # these nodes come first; one draft alone has rho = 1
    if several:
        rho[:several] = solve_rho(p[:several], q[:several], k[:several])
    x = draft.tokens[0, draft.children.clamp_min(0)]
    chances = (p.gather(1, x) / (rho * q.gather(1, x))).masked_fill(draft.children < 0, 0.0)
    passing = torch.minimum(q, p / rho)
    left = (p - passing * _gain(passing.sum(1, keepdim=True), k)).clamp_min_(0.0)
    # p == q leaves nothing, and there nothing fails but by rounding.
    return chances, torch.where(left.sum(1, keepdim=True) > 0, left, p)


def solve_rho(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """rho* ``[U, 1]`` in [1, k], the root of 1 - (1 - beta)^k = rho beta, or slightly more.

    Bisection on rho = G(rho), G = p_acc / beta. Any rho >= G(rho) is valid, the smallest accepts most. As G rises with
    rho, G(rho) lies between rho and the root, so that an end may move to G(middle), beyond the middle itself. The upper
    end is valid throughout, however early this stops.

    Args:
        p: ``[U, V]``, like ``q``. k: ``[U, 1]`` drafts at each node.
    """
    low, high = torch.ones_like(p[:, :1]), k.to(p.dtype)
    for _ in range(BISECTIONS):
        middle = low.lerp(high, 0.5)
        gain = _gain(torch.minimum(q, p / middle).sum(1, keepdim=True), k)
        valid = gain <= middle
        low, high = torch.where(valid, low, gain), torch.where(valid, gain, high)
    return high.clamp_min(1.0)


def _gain(beta: Tensor, k: Tensor) -> Tensor:
    """p_acc / beta = (1 - (1 - beta)^k) / beta, which is k where beta = 0."""
    minus_beta = -beta.clamp(torch.finfo(beta.dtype).tiny, 1.0)
    return torch.expm1(k * torch.log1p(minus_beta)) / minus_beta
