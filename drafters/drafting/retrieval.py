"""Base of retrieval drafters (prompt lookup, suffix, REST): draft a copy of what followed an earlier match.

A match is an earlier occurrence of the text's last tokens. A method implements ``Retrieval.retrieve``.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drafters.base import Drafter
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.target import FeatureOutput

if TYPE_CHECKING:
    from drafters.policy.copies import CopyPolicy

BETWEEN = -1  # separates two texts; it is no token, so neither a match nor a draft crosses it


class Copy(NamedTuple):
    """A draft tree of copied tokens, on the host.

    Attributes:
        tokens: token of each node.
        parents: parent of each node, as in ``DraftTree``.
        shares: each node's share of the earlier occurrences that continue with it, n / (total + 1): 0.5 for the
            only occurrence, 0.8 for all of four.
        match: length of the match in tokens.
    """

    tokens: list[int]
    parents: list[int]
    shares: list[float]
    match: int


NOTHING = Copy([], [], [], 0)


def draft_of(copies: Sequence[Copy], device: torch.device) -> DraftTree:
    """The draft of one copy per sequence."""
    return DraftTree.of_rows([copy.tokens for copy in copies], [copy.parents for copy in copies], device)


def part_of(copy: Copy, nodes: Sequence[int]) -> Copy:
    """The part of a copy with ``nodes``, in this order; the parent of each node is one of them."""
    number = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
    parents = [number[copy.parents[node]] for node in nodes]
    return Copy([copy.tokens[n] for n in nodes], parents, [copy.shares[n] for n in nodes], copy.match)


class Next(NamedTuple):
    """A token that follows a match.

    Attributes:
        token: the token.
        places: number of occurrences of the match that it follows.
        rank: order among equally likely tokens; the smallest is drafted first.
        at: argument of ``after`` for the tokens behind this one.
    """

    token: int
    places: int
    rank: int
    at: Any


def likeliest_tree(
    after: Callable[[Any], Iterable[Next]],
    at: Any,
    match: int,
    most: int,
    least: float,
    stop: frozenset[int],
    chain: bool = False,
) -> tuple[float, Copy]:
    """Return the copy of the ``most`` likeliest nodes after a match, likeliest first, and its score.

    The chance of a node is its parent's chance times the share of the occurrences that it follows. The score is the sum
    of the chances: the expected number of accepted tokens, if continuations repeat at these rates.

    Args:
        after: returns the tokens that follow ``at``.
        at: the end of the match, as ``after`` takes it.
        match: length of the match in tokens.
        most: most nodes.
        least: least chance of a node.
        stop: tokens that end a path (EOS).
        chain: keep one path, of the likeliest node at each depth.
    """
    copy, score = Copy([], [], [], match), 0.0
    heap: list[tuple[float, int, int, int, Next, float]] = []
    parent, parent_chance, number = ROOT, 1.0, 0
    while len(copy.tokens) < most:
        children = list(after(at)) if parent == ROOT or copy.tokens[parent] not in stop else []
        total = sum(child.places for child in children)
        for child in children:
            chance = parent_chance * child.places / total
            if chance >= least and child.token != BETWEEN:
                number += 1  # unique, so that the heap never compares the later entries
                heapq.heappush(heap, (-chance, child.rank, number, parent, child, child.places / (total + 1)))
        if not heap:
            break
        negative_chance, _, _, its_parent, best, share = heapq.heappop(heap)
        copy.tokens.append(best.token)
        copy.parents.append(its_parent)
        copy.shares.append(share)
        parent, parent_chance, at = len(copy.tokens) - 1, -negative_chance, best.at
        score += parent_chance
        if chain:
            heap.clear()  # drops the siblings
    return score, copy


class Retrieval(Drafter):
    """A retrieval drafter. It looks up the sequences of a batch one by one and drafts deterministic nodes.

    Attributes:
        policy: cuts copies to the profitable nodes; None drafts whole copies.
    """

    max_batch = None
    follows = True
    policy: "CopyPolicy | None" = None
    _copies: list[Copy]  # of the latest step, before the policy cut them

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        """Return the copy for a sequence, ``NOTHING`` without a match."""
        raise NotImplementedError

    def retrieve_all(self, state: DecodeState) -> list[Copy]:
        """``retrieve`` for every sequence; ``NOTHING`` for finished ones."""
        return [NOTHING if state.finished[row] else self.retrieve(state, row) for row in range(state.batch)]

    def propose(self, state: DecodeState) -> DraftTree:
        copies = self._copies = self.retrieve_all(state)
        if self.policy is not None:
            copies = self.policy.select(copies, state)
        return draft_of(copies, self.target.device) if any(copy.tokens for copy in copies) else state.nothing

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if self.policy is not None:
            self.policy.learn(self._copies, verdict)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        """Nothing to do: lookups read ``state.tokens``."""

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        """Nothing to do: lookups read ``state.tokens``."""
