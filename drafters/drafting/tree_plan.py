"""Growing draft trees level by level: shapes fixed beforehand (EAGLE, Figure 9) and shapes chosen by confidence
(EAGLE-2).

Both forward only nodes that have children, and never leave the device.
"""

from collections.abc import Callable

import torch

from ..decoding.draft_tree import ROOT, DraftTree, tree_mask
from ..decoding.sampling import Sampling, draw_without_replacement
from ..model.rows import CHAIN, Rows

# EAGLE, Figure 9: 25 nodes, 4/8/8/3/2 a level, each given by the ranks of its ancestors among their siblings.
EAGLE_TREE = [
    *([0], [1], [2], [3]),
    *([0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]),
    *([0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]),
    *([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]),
    *([0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
]

# (features [B, R, H], tokens [B, R], rows) -> predicted features [B, R, H]
Extend = Callable[[torch.Tensor, torch.Tensor, Rows], torch.Tensor]
LMHead = Callable[[torch.Tensor], torch.Tensor]


class _Level:
    """One level of a plan: which forwarded row of the level before each node hangs from, and which nodes go on."""

    def __init__(self, parent_row: list[int], rank: list[int], inner: list[int], device: torch.device) -> None:
        self.children = max(rank) + 1
        self.parent_row = torch.tensor(parent_row, device=device)
        self.rank = torch.tensor(rank, device=device)
        self.inner = torch.tensor(inner, dtype=torch.long, device=device)  # nodes of this level with children
        self.rows = CHAIN  # of the inner nodes, behind those of the levels before


class TreePlan:
    """Everything about a tree of fixed shape that can be worked out before decoding.

    Args:
        paths: the nodes, each as the ranks of its ancestors and itself among their siblings.

    Raises:
        ValueError: a node whose parent or elder sibling is missing, or a node given twice.
    """

    def __init__(self, paths: list[list[int]], device: torch.device) -> None:
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        _check_paths(ordered)
        self.size = len(ordered)
        index = {path: node for node, path in enumerate(ordered)}
        self.parents = parents = tuple(index.get(path[:-1], ROOT) for path in ordered)
        self.is_chain = parents == tuple(range(ROOT, self.size - 1))
        see = tree_mask(parents, torch.device("cpu"))[0][0]
        inner_nodes = sorted(set(parents) - {ROOT})
        self.q_row = tuple(0 if p == ROOT else 1 + inner_nodes.index(p) for p in parents)
        self.levels: list[_Level] = []
        for depth in range(1, len(ordered[-1]) + 1 if ordered else 1):
            self.levels.append(self._level(depth, ordered, index, inner_nodes, see, device))

    def _level(
        self,
        depth: int,
        ordered: list[tuple[int, ...]],
        index: dict[tuple[int, ...], int],
        inner_nodes: list[int],
        see: torch.Tensor,
        device: torch.device,
    ) -> _Level:
        nodes = [path for path in ordered if len(path) == depth]
        before = [node for node in inner_nodes if len(ordered[node]) == depth - 1]
        rows = [before.index(index[path[:-1]]) if depth > 1 else 0 for path in nodes]
        level = _Level(rows, [path[-1] for path in nodes], [], device)
        first = index[nodes[0]]
        inner = [node for node in inner_nodes if len(ordered[node]) == depth]
        level.inner = torch.tensor([node - first for node in inner], dtype=torch.long, device=device)
        if inner:
            so_far = [node for node in inner_nodes if len(ordered[node]) <= depth]
            rows_of = torch.tensor(so_far) + 1
            sees = see[torch.tensor(inner) + 1][:, rows_of][None].to(device)
            depths = torch.tensor([[len(ordered[node]) - 1 for node in so_far]], device=device)
            offset = len(so_far) - len(inner)
            level.rows = Rows(offset=offset) if self.is_chain else Rows(sees, depths, offset)
        return level


def _check_paths(ordered: list[tuple[int, ...]]) -> None:
    known = set(ordered)
    if len(known) != len(ordered):
        raise ValueError("a tree path is given twice; give every node once")
    for path in ordered:
        needed = [path[:-1]] if len(path) > 1 else []
        needed += [path[:-1] + (path[-1] - 1,)] if path and path[-1] > 0 else []
        if not path or min(path) < 0 or any(node not in known for node in needed):
            raise ValueError(f"tree path {list(path)} has no parent or elder sibling among the paths; add it")


def grow_static(
    predicted: torch.Tensor,
    extend: Extend,
    lm_head: LMHead,
    plan: TreePlan,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> DraftTree:
    """Fill a plan with tokens: greedy takes each node's top children, else they are drawn without replacement.

    Args:
        predicted: ``[B, 1, H]`` the feature predicted for the root.
    """
    tokens, valid, q = [], [], []
    for level in plan.levels:
        logits = lm_head(predicted)
        if sampling.greedy:
            children = logits.topk(level.children, dim=-1).indices
        else:
            q.append(sampling.probabilities(logits))
            children, real = draw_without_replacement(q[-1], level.children, generator)
            valid.append(real[:, level.parent_row, level.rank])
        chosen = children[:, level.parent_row, level.rank]
        tokens.append(chosen)
        if len(level.inner):
            # Each inner node goes on from its own token and the feature predicted at its parent's row.
            features = predicted[:, level.parent_row[level.inner]]
            predicted = extend(features, chosen[:, level.inner], level.rows)
    return DraftTree.from_parents(
        torch.cat(tokens, 1),
        plan.parents,
        q=torch.cat(q, 1) if q else None,
        q_row=plan.q_row,
        valid=torch.cat(valid, 1) if valid else None,
    )


def grow_dynamic(
    predicted: torch.Tensor, extend: Extend, lm_head: LMHead, depth: int, top_k: int, nodes: int
) -> DraftTree:
    """EAGLE-2: extend the ``top_k`` most confident nodes a level, then keep the ``nodes`` most confident of all.

    Confidence is the cumulative log-probability, in float32. Sorting is stable and candidates stand level by level,
    so that on a tie a parent precedes its child: no child is ever kept without its parent. Nodes are deterministic
    children: sampled decoding accepts them with probability p.
    """
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
    for level in range(1, depth):
        depths = torch.arange(level, device=device).repeat_interleave(top_k)[None]
        predicted = extend(features, tokens, Rows(see, depths, (level - 1) * top_k))
        step, children = lm_head(predicted).float().log_softmax(-1).topk(top_k, dim=-1)
        candidates = (scores[..., None] + step).flatten(1)
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
    draft = _rerank(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), nodes)
    draft.draws = (0,) * depth
    return draft


def _rerank(scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, nodes: int) -> DraftTree:
    """The ``nodes`` best candidates ``[B, C]`` of each row, renumbered."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :nodes]
    kept = best.sort(dim=-1).values
    number = torch.full_like(tokens, -2)
    number.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    old = parents.gather(1, kept)
    new = torch.where(old == ROOT, ROOT, number.gather(1, old.clamp_min(0)))
    if new.device.type == "cpu":  # elsewhere reading it would stall the device
        assert bool((new > -2).all()), "a draft node was kept without its parent"
    return DraftTree(tokens.gather(1, kept), new)
