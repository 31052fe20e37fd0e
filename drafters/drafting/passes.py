"""Fill a static tree level by level where one call runs a whole pass of the head (``backend.head_pass``)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from drafters.drafting.tree_plan import TreePlan
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.cache import KVCache
from drafters.model.draft_head import DraftHead
from drafters.model.runner import model_time

if TYPE_CHECKING:
    from drafters.cpu.layers import HeadPass


class Level(NamedTuple):
    """Candidates below each extended node, the likeliest first.

    Attributes:
        places: rows of the draft head's logits. tokens: the same as token ids. probabilities: of each.
    """

    places: list[list[int]]
    tokens: list[list[int]]
    probabilities: list[list[float]]


class Nodes(NamedTuple):
    """Candidates to extend.

    Attributes:
        parents: for each, the row of the last level that it is a candidate of. tokens: of each.
        seen: for every node extended so far, these last, the numbers of the nodes that it attends to: its ancestors
            and itself.
    """

    parents: list[int]
    tokens: list[int]
    seen: list[list[int]]

    @property
    def before(self) -> int:
        """Number of nodes extended before these."""
        return len(self.seen) - len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if it is one node that attends to all nodes before it."""
        return len(self.tokens) == 1 and len(self.seen[-1]) == len(self.seen)


class OneCallPasses:
    """The passes over one draft, one call each; the first also takes in the committed tokens.

    Args:
        features: ``[n, H]`` pending features of the target. following: the token after each.
        cache: the head's; it keeps the pending rows.
    """

    def __init__(
        self, run: "HeadPass", head: DraftHead, features: Tensor, following: list[int], cache: KVCache
    ) -> None:
        self._run, self._head, self._features, self._following = run, head, features, following
        self._cache = cache

    def first(self, ranks: int) -> Level:
        """``ranks`` candidates below the root."""
        count = len(self._following)
        found = self._pass(range(count), self._following, ranks, judged=1)
        self._cache.commit_first([count])
        self._features = self._features[-1:]
        return found

    def further(self, nodes: Nodes, ranks: int) -> Level:
        """``ranks`` candidates below each of ``nodes``."""
        seen = None if nodes.is_chain else nodes.seen[nodes.before :]
        return self._pass(nodes.parents, nodes.tokens, ranks, seen, nodes.before)

    def _pass(self, parents: Sequence[int], tokens: list[int], ranks: int, *rest: Any, **named: Any) -> Level:
        ranks = min(ranks, self._head.width)
        with model_time():
            found = self._run(self._features, parents, tokens, self._cache, ranks, *rest, **named)
        self._features, places, probabilities = found
        return Level(places, [self._head.named(some) for some in places], probabilities)


def grow_planned(passes: OneCallPasses, plan: TreePlan, device: torch.device) -> DraftTree:
    """A tree of fixed shape, filled with the likeliest candidates of each node."""
    tokens: list[int] = []  # of each node so far, in the plan's order
    output_row = {ROOT: 0}  # of an extended node: its row in the latest pass
    attends: dict[int, list[int]] = {ROOT: []}  # of an extended node: the uncommitted cache rows that it attends to
    seen: list[list[int]] = []
    extended = Nodes([], [], [])
    for level in range(plan.above[-1] + 1):
        nodes = [node for node in range(plan.size) if plan.above[node] == level]
        ranks = 1 + max(plan.ranks[node] for node in nodes)
        found = passes.further(extended, ranks) if level else passes.first(ranks)
        tokens += [found.tokens[output_row[plan.parents[node]]][plan.ranks[node]] for node in nodes]
        inner = [node for node in nodes if plan.children[node + 1]]  # the next pass extends these
        for node in inner:
            attends[node] = [*attends[plan.parents[node]], len(seen)]
            seen.append(attends[node])
        rows = [output_row[plan.parents[node]] for node in inner]
        extended = Nodes(rows, [tokens[node] for node in inner], list(seen))
        output_row = {node: row for row, node in enumerate(inner)}
    return DraftTree.from_parents(torch.tensor([tokens], device=device), plan.parents)
