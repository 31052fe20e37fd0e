"""Grow a draft over slots: fill a plan of nodes with tokens, or keep the likeliest nodes.

A head answers as *slots*: the scores of the tokens after the nodes of each depth. They are the same for all nodes of a
depth (DFlash's marginals, Medusa's heads), or depend on the tokens before (EAGLE, DSpark). Both trees are lossless: the
shape of a plan does not depend on the tokens, and the nodes of the likeliest tree are deterministic.
"""

import torch
from torch import Tensor

from drafters.drafting.tree_plan import TreePlan
from drafters.loop.sampling import Sampling, draw_without_replacement
from drafters.loop.tree import ROOT, DraftTree


class Slots:
    """Scores of the nodes of a draft over W tokens, which are the drafter's vocabulary.

    ``fill`` and ``likeliest`` call ``logits(0)`` for the root, then for each further depth ``follow`` with chosen nodes
    and ``logits``.

    Attributes:
        shared: the scores of a slot are the same for all nodes before it.
        places: ``[B, n, k]`` of the latest scores among ``among`` tokens (candidates); None: they are of all W.
    """

    shared = False
    places: Tensor | None = None
    among = 0

    def named(self, chosen: Tensor) -> Tensor:
        """Places among the W of choices ``[B, n, c]`` among the latest scores."""
        return chosen if self.places is None else self.places.gather(-1, chosen)

    def logits(self, depth: int) -> Tensor:
        """``[B, n, W]`` of the tokens after n nodes of one depth (0: the root); n is 1 if they are shared."""
        raise NotImplementedError

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        """Go on from chosen nodes: ``tokens [B, n]``, places among the W; ``parents [B, n]`` or ``[n]``, rows of the
        latest ``logits``."""

    def goes_on(self, tokens: Tensor) -> bool:
        """Return False if the draft ends with this level; ``tokens [B, n]``, places of all nodes of the level."""
        return True

    def certainty(self) -> Tensor:
        """``[B, D]`` estimated acceptance of each slot of a chain, as a logit; it reads only tokens before the slot."""
        raise NotImplementedError


class Marginals(Slots):
    """Slots whose scores do not depend on each other: ``logits [B, D, W]``, or those at ``places [B, D, k]``."""

    shared = True

    def __init__(self, logits: Tensor, places: Tensor | None = None, among: int = 0) -> None:
        self._logits, self._places, self.among = logits, places, among

    def logits(self, depth: int) -> Tensor:
        """``[B, 1, W]``."""
        self.places = None if self._places is None else self._places[:, depth : depth + 1]
        return self._logits[:, depth : depth + 1]

    def certainty(self) -> Tensor:
        return top_logit(self._logits)


def top_logit(logits: Tensor) -> Tensor:
    """The logit of the largest probability of each distribution, ``[..., W]`` -> ``[...]``.

    It belongs to the distribution, not to the token that is drawn from it.
    """
    return logits.float().log_softmax(-1).amax(-1).exp().logit(eps=1e-6)


def fill(slots: Slots, plan: TreePlan, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
    """Fill a plan with tokens: the likeliest children of each node when greedy, otherwise draws without replacement.

    Shared slots are drawn once, and the draws are the children of all nodes before the slot. Verification walks one
    path, which meets each slot once, so that this is lossless. The draft may end early (``Slots.goes_on``).
    """
    tokens: list[Tensor] = []
    valid: list[Tensor] = []
    q: list[Tensor] = []
    for depth, level in enumerate(plan.levels):
        children, real = children_of(slots.logits(depth), level.children, sampling, generator, q)  # [B, n, children]
        if slots.places is not None and q:
            q[-1] = q[-1].new_zeros(*q[-1].shape[:-1], slots.among).scatter_(-1, slots.places, q[-1])
        children = slots.named(children)
        row = torch.zeros_like(level.parent_row) if slots.shared else level.parent_row
        chosen = children[:, row, level.rank]  # [B, nodes of the level]
        tokens.append(chosen)
        if real is not None:
            valid.append(real[:, row, level.rank])
        if not slots.goes_on(chosen):
            break
        if len(level.inner):
            slots.follow(chosen[:, level.inner], row[level.inner])
    every = torch.cat(tokens, 1)
    return DraftTree.from_parents(
        every,
        plan.parents[: every.shape[1]],
        q=torch.cat(q, 1) if q else None,
        q_row=(plan.above if slots.shared else plan.q_row)[: every.shape[1]],
        valid=torch.cat(valid, 1) if valid else None,
    )


def children_of(
    logits: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None, q: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Choose ``count`` tokens per row of ``logits [B, R, V]``.

    Args:
        q: the distributions of drawn tokens are appended to it.

    Returns:
        tokens ``[B, R, count]``, and for drawn ones ``[B, R, count]``: False beyond the support of the distribution.
    """
    if sampling.greedy:
        return logits.topk(count, dim=-1).indices, None
    q.append(sampling.probabilities(logits))
    return draw_without_replacement(q[-1], count, generator)


def likeliest(slots: Slots, depth: int, top_k: int, nodes: int) -> DraftTree:
    """The ``nodes`` best nodes by cumulative log-probability, to at most ``depth`` levels.

    Over shared slots the tree is exact for ``top_k`` candidates in each slot (DDTree, arXiv 2604.12989): the best nodes
    include at most ``nodes`` of a level, so that many are extended. Other slots are scored for each path, and ``top_k``
    paths of a level are extended (EAGLE-2). Nodes are deterministic: sampled decoding accepts one with probability p.
    """
    width = nodes if slots.shared else top_k
    scores: Tensor | None = None  # of the extended nodes, float32 [B, n]
    all_scores, all_tokens, all_parents = [], [], []
    frontier, first = None, 0
    for level in range(depth):
        step, children = slots.logits(level).float().log_softmax(-1).topk(top_k, dim=-1)  # [B, 1 or n, k]
        children = slots.named(children)
        if scores is None:
            scores = step.new_zeros(len(step), 1)
            frontier = torch.full_like(children[..., 0], ROOT)
        assert frontier is not None
        candidates = (scores[..., None] + step).flatten(1)  # [B, n * k]
        tokens = children.expand(-1, scores.shape[1], -1).flatten(1)
        all_scores.append(candidates)
        all_tokens.append(tokens)
        all_parents.append(frontier.repeat_interleave(top_k, dim=1))
        if level == depth - 1:
            break
        # Sorting is stable: on a tie, no node comes before its parent.
        scores, best = (part[:, :width] for part in candidates.sort(dim=-1, descending=True, stable=True))
        slots.follow(tokens.gather(1, best), best // top_k)
        frontier, first = best + first, first + candidates.shape[1]
    draft = rerank(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), nodes)
    draft.draws = (0,) * depth
    return draft


def rerank(scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int) -> DraftTree:
    """Keep the ``nodes`` best of the candidates ``[B, C]`` of each sequence, renumbered."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :nodes]
    indices = best.sort(dim=-1).values
    number = torch.full_like(tokens, -2)
    number.scatter_(1, indices, torch.arange(indices.shape[1], device=indices.device).expand_as(indices))
    old = parents.gather(1, indices)
    new = torch.where(old == ROOT, ROOT, number.gather(1, old.clamp_min(0)))
    if new.device.type == "cpu":  # on a GPU the check would synchronise
        assert bool((new > -2).all()), "a draft node was kept without its parent"
    return DraftTree(tokens.gather(1, indices), new)
