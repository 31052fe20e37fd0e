"""Plans of drafts: trees of a fixed shape (EAGLE, Figure 9), with the indices and masks that growing one needs."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.loop.tree import ROOT, tree_mask
from drafters.model.rows import Rows

# EAGLE, Figure 9: 25 nodes, 4/8/8/3/2 per level. A node is given by its path: the rank among its siblings of each
# ancestor and of itself.
_PATHS = """0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"""
EAGLE_TREE = [[int(rank) for rank in path] for path in _PATHS.split()]


class _Level(NamedTuple):
    """One level of a plan: n nodes, i of them with children.

    Attributes:
        children: most children of a node of the previous level.
        parent_row: ``[n]`` index of each node's parent among the inner nodes of the previous level.
        rank: ``[n]`` rank of each node among its siblings.
        inner: ``[i]`` indices of the inner nodes, which have children and are forwarded.
        rows: mask and positions of the inner nodes, after the tokens of the previous levels.
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
            extended = [node for node in inner if len(ordered[node]) == depth]
            so_far = [node for node in inner if len(ordered[node]) <= depth]
            offset = len(so_far) - len(extended)
            depths = torch.tensor([[len(ordered[node]) - 1 for node in so_far]], device=device)
            chosen = torch.tensor(extended, dtype=torch.long, device=device)
            ranks = [ordered[node][-1] for node in nodes]
            level = _Level(
                children=max(ranks) + 1,
                parent_row=torch.tensor([before.index(self.parents[node]) for node in nodes], device=device),
                rank=torch.tensor(ranks, device=device),
                inner=chosen - nodes[0],
                rows=Rows(offset=offset) if self.is_chain else Rows(see[chosen][None, :, so_far], depths, offset),
            )
            self.levels.append(level)
            before = extended


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


def check_children(plan: TreePlan, tokens: int) -> None:
    """Raise ValueError if a node of the plan has more children than the ``tokens`` that can be drafted."""
    if (most := max(plan.children)) > tokens:
        raise ValueError(
            f"a node of the static tree has {most} children, and the drafter drafts with {tokens} tokens; give paths "
            f"with at most {tokens} children of a node, or a larger draft vocabulary"
        )
