"""The passes of a head by which a draft grows, level after level, as the host sees them: nodes in, candidates out.

Two ways: torch's operations, for any head; and one call for a pass, where there is a kernel for it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.drafting.tree_plan import Extend, TreePlan
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.cache import KVCache
from drafters.model.draft_head import DraftHead
from drafters.model.rows import Rows
from drafters.model.runner import model_time

if TYPE_CHECKING:
    from drafters.cpu.layers import HeadPass


class Level(NamedTuple):
    """What one pass of the head gives, of each node that it went on from: candidate ``tokens`` (of the target's
    vocabulary), ``places`` (of the draft head's) and their ``probabilities``, the likeliest first."""

    places: list[list[int]]
    tokens: list[list[int]]
    probabilities: list[list[float]]


class Nodes(NamedTuple):
    """Candidates to go on from.

    Attributes:
        parents: rows of the last level that they are candidates of. places, tokens: of each.
        seen: of every node that was gone on from, these being the last, the numbers of those that it sees: its
            ancestors and itself.
    """

    parents: list[int]
    places: list[int]
    tokens: list[int]
    seen: list[list[int]]

    @property
    def before(self) -> int:
        """How many were gone on from before these."""
        return len(self.seen) - len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether it is one node, behind all those before it."""
        return len(self.tokens) == 1 and len(self.seen[-1]) == len(self.seen)


class Passes(Protocol):
    """One draft's."""

    def first(self, ranks: int) -> Level:
        """So many candidates below the root."""

    def further(self, nodes: Nodes, ranks: int) -> Level:
        """So many below each of these."""


class TorchPasses:
    """Through ``extend`` and the draft head.

    Args:
        predicted: ``[1, 1, H]`` the feature predicted for the root. extend: places of the draft head in, features out.
    """

    def __init__(self, predicted: Tensor, extend: Extend, head: DraftHead) -> None:
        self._predicted, self._extend, self._head = predicted, extend, head

    def first(self, ranks: int) -> Level:
        """As ``Passes``."""
        found = self._head(self._predicted)[0].float().softmax(-1).topk(min(ranks, self._head.width), dim=-1)
        return Level(found.indices.tolist(), self._head.tokens(found.indices).tolist(), found.values.tolist())

    def further(self, nodes: Nodes, ranks: int) -> Level:
        """As ``Passes``."""
        device, rows, before = self._predicted.device, Rows(offset=nodes.before), nodes.before
        if not nodes.is_chain:
            see = torch.zeros(1, len(nodes.tokens), len(nodes.seen), dtype=torch.bool)
            for row, others in enumerate(nodes.seen[before:]):
                see[0, row, others] = True
            depths = torch.tensor([[len(others) - 1 for others in nodes.seen]], device=device)
            rows = Rows(see.to(device), depths, before)
        parents, places = (torch.tensor(part, device=device) for part in (nodes.parents, nodes.places))
        self._predicted = self._extend(self._predicted[:, parents], places[None], rows)
        return self.first(ranks)


class OneCallPasses:
    """Each pass in one call of ``backend.head_pass``; the first one also takes in the committed tokens.

    Args:
        features: ``[n, H]`` the target's, of rows that the head has not taken in yet. following: the token after each.
        cache: the head's; those rows stay in it.
    """

    def __init__(
        self, run: "HeadPass", head: DraftHead, features: Tensor, following: list[int], cache: KVCache
    ) -> None:
        self._run, self._head, self._features, self._following = run, head, features, following
        self._cache = cache

    def first(self, ranks: int) -> Level:
        """As ``Passes``."""
        count = len(self._following)
        found = self._pass(range(count), self._following, ranks, judged=1)
        self._cache.commit_first([count])
        self._features = self._features[-1:]
        return found

    def further(self, nodes: Nodes, ranks: int) -> Level:
        """As ``Passes``."""
        seen = None if nodes.is_chain else nodes.seen[nodes.before :]
        return self._pass(nodes.parents, nodes.tokens, ranks, seen, nodes.before)

    def _pass(self, parents: Sequence[int], tokens: list[int], ranks: int, *rest: Any, **named: Any) -> Level:
        ranks = min(ranks, self._head.width)
        with model_time():
            found = self._run(self._features, parents, tokens, self._cache, ranks, *rest, **named)
        self._features, places, probabilities = found
        return Level(places, [self._head.named(some) for some in places], probabilities)


def grow_planned(passes: Passes, plan: TreePlan, device: torch.device) -> DraftTree:
    """A tree of fixed shape, filled with each node's likeliest candidates."""
    rows, seen, tokens = {ROOT: 0}, list[list[int]](), list[int]()
    numbers: dict[int, list[int]] = {ROOT: []}  # of a node gone on from: what it sees
    going = Nodes([], [], [], [])
    for level in range(plan.above[-1] + 1):
        nodes = [node for node in range(plan.size) if plan.above[node] == level]
        ranks = 1 + max(plan.ranks[node] for node in nodes)
        found = passes.first(ranks) if not level else passes.further(going, ranks)
        at = [(rows[plan.parents[node]], plan.ranks[node]) for node in nodes]
        tokens += [found.tokens[row][rank] for row, rank in at]
        inner = [place for place, node in enumerate(nodes) if plan.children[node + 1]]
        for place in inner:
            numbers[nodes[place]] = [*numbers[plan.parents[nodes[place]]], len(seen)]
            seen.append(numbers[nodes[place]])
        chosen = [at[place] for place in inner]
        places = [found.places[row][rank] for row, rank in chosen]
        going = Nodes([row for row, _ in chosen], places, [found.tokens[row][rank] for row, rank in chosen], list(seen))
        rows = {nodes[place]: row for row, place in enumerate(inner)}
    return DraftTree.from_parents(torch.tensor([tokens], device=device), plan.parents)
