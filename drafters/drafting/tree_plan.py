"""Draft trees grown level by level: of a fixed shape (EAGLE, Figure 9), or by confidence (EAGLE-2).

Both run the head only over nodes that have children, and never synchronise with the host.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.loop.sampling import Sampling, draw_without_replacement
from drafters.loop.tree import ROOT, DraftTree, tree_mask
from drafters.model.rows import Rows

# EAGLE, Figure 9: 25 nodes, 4/8/8/3/2 per level. A node is given by its path: the rank among its siblings of each
# ancestor and of itself.
_PATHS = """0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"""
EAGLE_TREE = [[int(rank) for rank in path] for path in _PATHS.split()]

# (features [B, R, H], tokens [B, R], rows) -> predicted features [B, R, H]
Extend = Callable[[Tensor, Tensor, Rows], Tensor]
LMHead = Callable[[Tensor], Tensor]


class _Level(NamedTuple):
    """One level of a plan: n nodes, i of them with children.

    Attributes:
        children: most children of a node of the previous level.
        parent_row: ``[n]`` index of each node's parent among the inner nodes of the previous level.
        rank: ``[n]`` rank of each node among its siblings.
        inner: ``[i]`` indices of the inner nodes, which have children and are forwarded.
        rows: mask and positions of the inner nodes, after the rows of the previous levels.
    """

    children: int
    parent_row: Tensor
    rank: Tensor
    inner: Tensor
    rows: Rows


class TreePlan:
    """Indices and masks of a tree of fixed shape, computed once.

    Args:
        paths: the nodes, each as the ranks of its ancestors and itself among their siblings.

    Raises:
        ValueError: a node whose parent or previous sibling is missing, or a node given twice.
    """

    def __init__(self, paths: list[list[int]], device: torch.device) -> None:
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        _check_paths(ordered)
        index = {path: node for node, path in enumerate(ordered)}
        self.size, self.parents = len(ordered), tuple(index.get(path[:-1], ROOT) for path in ordered)
        self.ranks = tuple(path[-1] for path in ordered)
        self.above = tuple(len(path) - 1 for path in ordered)  # number of nodes between each node and the root
        self.choice = torch.tensor([self.above, self.ranks], dtype=torch.long, device=device)  # [2, N]
        self.children = tuple(self.parents.count(node) for node in range(ROOT, self.size))  # of the root and each node
        self.is_chain = self.parents == tuple(range(ROOT, self.size - 1))
        inner = self.inner = sorted(set(self.parents) - {ROOT})  # only nodes with children are forwarded
        self.q_row = tuple(0 if parent == ROOT else 1 + inner.index(parent) for parent in self.parents)
        see = tree_mask(self.parents, device)[0][0, 1:, 1:]
        self.levels: list[_Level] = []
        before = [ROOT]
        for depth in range(1, len(ordered[-1]) + 1 if ordered else 1):
            nodes = [node for node, path in enumerate(ordered) if len(path) == depth]
            own = [node for node in inner if len(ordered[node]) == depth]
            so_far = [node for node in inner if len(ordered[node]) <= depth]
            offset = len(so_far) - len(own)
            depths = torch.tensor([[len(ordered[node]) - 1 for node in so_far]], device=device)
            chosen = torch.tensor(own, dtype=torch.long, device=device)
            ranks = [ordered[node][-1] for node in nodes]
            level = _Level(
                children=max(ranks) + 1,
                parent_row=torch.tensor([before.index(self.parents[node]) for node in nodes], device=device),
                rank=torch.tensor(ranks, device=device),
                inner=chosen - nodes[0],
                rows=Rows(offset=offset) if self.is_chain else Rows(see[chosen][None, :, so_far], depths, offset),
            )
            self.levels.append(level)
            before = own


@lru_cache(maxsize=256)
def tree_plan(paths: tuple[tuple[int, ...], ...], device: torch.device) -> TreePlan:
    """The plan of a tree, cached."""
    return TreePlan([list(path) for path in paths], device)


def chain_plan(length: int, device: torch.device) -> TreePlan:
    """The plan of a chain."""
    return tree_plan(tuple((0,) * level for level in range(1, length + 1)), device)


def _check_paths(ordered: list[tuple[int, ...]]) -> None:
    known = set(ordered)
    if len(known) != len(ordered):
        raise ValueError("a tree path is given twice; give every node once")
    for path in ordered:
        needed = [path[:-1]] if len(path) > 1 else []
        needed += [path[:-1] + (path[-1] - 1,)] if path and path[-1] > 0 else []
        if not path or min(path) < 0 or any(node not in known for node in needed):
            raise ValueError(f"tree path {list(path)} has no parent or previous sibling among the paths; add it")


def check_children(plan: TreePlan, tokens: int) -> TreePlan:
    """Return the plan; raise ValueError if a node of it has more children than the ``tokens`` that can be drafted."""
    if (most := max(plan.children)) > tokens:
        raise ValueError(
            f"a node of the static tree has {most} children, and the drafter drafts with {tokens} tokens; give paths "
            f"with at most {tokens} children of a node, or a larger draft vocabulary"
        )
    return plan


def grow_static(
    predicted: Tensor,
    extend: Extend,
    lm_head: LMHead,
    plan: TreePlan,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> DraftTree:
    """Fill a plan with tokens: the likeliest children of each node when greedy, otherwise draws without replacement.

    Args:
        predicted: ``[B, 1, H]`` the feature predicted for the root.
        extend: runs the head over one level.
        lm_head: features ``[B, R, H]`` -> logits ``[B, R, V]``.
    """
    tokens: list[Tensor] = []
    valid: list[Tensor] = []
    q: list[Tensor] = []
    for level in plan.levels:
        logits = lm_head(predicted)  # [B, R, V]
        children, real = children_of(logits, level.children, sampling, generator, q)  # [B, R, children]
        if real is not None:
            valid.append(real[:, level.parent_row, level.rank])
        chosen = children[:, level.parent_row, level.rank]  # [B, n]
        tokens.append(chosen)
        if len(level.inner):
            # The head takes an inner node's token and the feature predicted for its parent.
            features = predicted[:, level.parent_row[level.inner]]
            predicted = extend(features, chosen[:, level.inner], level.rows)
    return DraftTree.from_parents(
        torch.cat(tokens, 1),
        plan.parents,
        q=torch.cat(q, 1) if q else None,
        q_row=plan.q_row,
        valid=torch.cat(valid, 1) if valid else None,
    )


def children_of(
    logits: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None, q: list[Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Choose ``count`` tokens per row of ``logits [B, R, V]``.

    Args:
        q: the distributions of drawn tokens are appended to it.

    Returns:
        tokens ``[B, R, count]``, and for drawn ones ``[B, R, count]``: False beyond the support of the distribution.
    """
    if sampling.greedy:
        return logits.topk(count, dim=-1).indices, None
    probabilities = sampling.probabilities(logits)
    if q is not None:
        q.append(probabilities)
    return draw_without_replacement(probabilities, count, generator)


def grow_dynamic(predicted: Tensor, extend: Extend, lm_head: LMHead, depth: int, top_k: int, nodes: int) -> DraftTree:
    """EAGLE-2: extend the ``top_k`` most confident nodes of a level, then keep the ``nodes`` most confident of all.

    Confidence is the cumulative log-probability, in float32. Candidates are in order of level and sorting is stable, so
    that on a tie a parent precedes its child and no child is kept without its parent. Nodes are deterministic: sampled
    decoding accepts one with probability p.
    """
    # Level 1: the children of the root.
    batch = len(predicted)
    scores, tokens = lm_head(predicted).float().log_softmax(-1).topk(top_k, dim=-1)  # [B, 1, k]
    scores, tokens = scores[:, 0], tokens[:, 0]
    all_scores, all_tokens = [scores], [tokens]
    all_parents = [torch.full_like(tokens, ROOT)]
    device, frontier = tokens.device, torch.arange(top_k, device=tokens.device).expand(batch, -1)
    features = predicted.expand(-1, top_k, -1)
    own = torch.eye(top_k, dtype=torch.bool, device=device).expand(batch, -1, -1)
    see = own
    first = 0  # index of this level's first candidate
    # Level by level: extend the frontier, and keep its top_k children as the next one.
    for level in range(1, depth):
        depths = torch.arange(level, device=device).repeat_interleave(top_k)[None]
        predicted = extend(features, tokens, Rows(see, depths, (level - 1) * top_k))
        step, children = lm_head(predicted).float().log_softmax(-1).topk(top_k, dim=-1)
        candidates = (scores[..., None] + step).flatten(1)  # [B, k * k]
        first += all_tokens[-1].shape[1]
        all_scores.append(candidates)
        all_tokens.append(children.flatten(1))
        all_parents.append(frontier.repeat_interleave(top_k, dim=1))
        if level == depth - 1:
            break
        scores, best = (part[:, :top_k] for part in candidates.sort(dim=-1, descending=True, stable=True))
        tokens, parent = all_tokens[-1].gather(1, best), (best // top_k)[..., None]
        features = predicted.gather(1, parent.expand(-1, -1, predicted.shape[-1]))
        frontier = best + first
        see = torch.cat([see.gather(1, parent.expand(-1, -1, see.shape[-1])), own], dim=-1)
    draft = rerank(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), nodes)
    draft.draws = (0,) * depth
    return draft


def rerank(scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int) -> DraftTree:
    """Keep the ``nodes`` best of the candidates ``[B, C]`` of each batch row, renumbered."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :nodes]
    kept = best.sort(dim=-1).values
    number = torch.full_like(tokens, -2)
    number.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    old = parents.gather(1, kept)
    new = torch.where(old == ROOT, ROOT, number.gather(1, old.clamp_min(0)))
    if new.device.type == "cpu":  # on a GPU the check would synchronise
        assert bool((new > -2).all()), "a draft node was kept without its parent"
    return DraftTree(tokens.gather(1, kept), new)
