"""What drafters that copy have in common: a place where the text's end stood before, and what followed it there."""

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

BETWEEN = -1  # stands between two texts: no token, so that no match reaches over it and no draft either


class Copy(NamedTuple):
    """A draft tree on the host, with the reasons for it.

    Attributes:
        tokens, parents: of each node, as a ``DraftTree`` has them.
        claims: of each node, the share of the places found that go on so, one place more being counted that does not:
            0.5 for the only one, 0.8 for all of four.
        match: how many of the text's last tokens were found.
    """

    tokens: list[int]
    parents: list[int]
    claims: list[float]
    match: int


NOTHING = Copy([], [], [], 0)


def draft_of(found: Sequence[Copy], device: torch.device) -> DraftTree:
    """Of all nodes, for a batch row each."""
    return DraftTree.of_rows([one.tokens for one in found], [one.parents for one in found], device)


def part_of(found: Copy, kept: Sequence[int]) -> Copy:
    """Only the nodes ``kept``, in their order; the parent of each is among them."""
    number = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
    parents = [number[found.parents[node]] for node in kept]
    return Copy([found.tokens[n] for n in kept], parents, [found.shares[n] for n in kept], found.match)


class Next(NamedTuple):
    """A token that follows at so many ``places``. Of equally likely ones the smallest ``rank`` is drafted first. ``at``
    is what ``likeliest_tree`` goes on from there.
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
    """The tree of at most ``most`` nodes after a match, the likeliest node first, and the sum of their chances.

    A node's chance, ``least`` or more, is its parent's times the share of the places at which it follows. Nothing comes
    behind a token in ``stop`` (EOS). ``chain``: one path, of which each node is the likeliest after the one before.
    """
    found, score = Copy([], [], [], match), 0.0
    heap: list[tuple[float, int, int, int, Next, float]] = []
    parent, above, number = ROOT, 1.0, 0
    while len(found.tokens) < most:
        children = list(after(at)) if parent == ROOT or found.tokens[parent] not in stop else []
        total = sum(child.places for child in children)
        for child in children:
            chance = above * child.places / total
            if chance >= least and child.token != BETWEEN:
                number += 1  # so that the heap compares no further
                heapq.heappush(heap, (-chance, child.rank, number, parent, child, child.places / (total + 1)))
        if not heap:
            break
        negative, _, _, its_parent, best, claim = heapq.heappop(heap)
        found.tokens.append(best.token)
        found.parents.append(its_parent)
        found.shares.append(claim)
        parent, above, at, score = len(found.tokens) - 1, -negative, best.at, score - negative
        if chain:
            heap.clear()  # its siblings
    return score, found


class Retrieval(Drafter):
    """A retrieval drafter: it copies what followed an earlier match. All that it knows, it reads in texts.

    Deterministic, so verification takes its q as one-hot. The rows of a batch are looked up one by one.

    Attributes:
        policy: cuts copies to what is profitable; None drafts all that is found.
    """

    max_batch = None
    follows = True
    policy: "CopyPolicy | None" = None
    _found: list[Copy]

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if self.policy is not None:
            self.policy.prepare(self, state.batch, state.sampling, state.longest)

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        """The copy that a batch row could continue with."""
        raise NotImplementedError

    def retrieve_all(self, state: DecodeState) -> list[Copy]:
        """``retrieve`` for every row; nothing for finished rows."""
        return [NOTHING if state.finished[row] else self.retrieve(state, row) for row in range(state.batch)]

    def propose(self, state: DecodeState) -> DraftTree:
        found = self._found = self.retrieve_all(state)
        if self.policy is not None:
            found = self.policy.select(found, state)
        return draft_of(found, self.target.device) if any(one.tokens for one in found) else state.nothing

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if self.policy is not None:
            self.policy.learn(self._found, verdict)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        """Nothing to do: lookups read ``state.tokens``."""

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        """Nothing to do: lookups read ``state.tokens``."""
