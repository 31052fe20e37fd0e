"""Trees that grow while they pay: a draft goes on, and keeps a token, as far as its own confidence is worth the time.

As EAGLE-2 (Li et al. 2024) this goes by the head's confidence, which is how likely a token is to be accepted; that is
not taken on trust but counted: how often candidates of such a probability, rank and depth were the target's choice.
With what forwards cost on this machine (``policy/costs.py``) the rest is arithmetic. A token is worth the time that
decoding needs for one, 1 / rate. A node is verified where its probability times a token's worth is more than a row
costs: of the candidates that there are no other choice has more tokens per second, if the rate is the best one
(Dinkelbach 1967), and it becomes so step by step. A draft pass is made where what it may be expected to add is worth
more than it takes; what comes after a node that was not looked at is a guess.

The choices are the host's, which on a CPU costs nothing; elsewhere each would stall the device.
"""

import itertools
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from drafters.base import Promised
from drafters.drafting.passes import Level, Nodes, Passes
from drafters.loop.tree import ROOT, DraftTree
from drafters.policy.counted import Counted
from drafters.policy.kept_costs import Costs, Curve
from drafters.policy.shape import WORTH, probe_after

DEPTHS, RANKS, BINS = 3, 4, 12  # kinds of candidates: the last depth and rank stand for those beyond, too
MEMORY = 0.97  # of the past steps, by which a step's worth is judged, a step later
FRONTIER = 4  # nodes that one pass goes on from, at most
SIGHT = 24  # of the likeliest candidates, by which a further pass is judged
FIRST = 16  # steps at a length that draft, whatever they promise


class Confidence:
    """How often a candidate is the target's choice, by depth, rank and the probability that the head gives it."""

    def __init__(self) -> None:
        self._counted = Counted(DEPTHS * RANKS * BINS)

    def of(self, depth: int, rank: int, probability: float) -> float:
        """P(the target chooses it | its ancestors are accepted); of NaN, from what is not finite, hardly any."""
        probability = probability if probability > 0.0 else 0.0
        return self._counted.share(_kind(depth, rank, probability), probability)

    def learn(self, depth: int, rank: int, probability: float, right: bool) -> None:
        """Whether it did."""
        self._counted.learn(_kind(depth, rank, probability), right)


def _kind(depth: int, rank: int, probability: float) -> int:
    """Bins are of equal width in the root of the probability: narrow where candidates are many and small."""
    place = min(int(BINS * math.sqrt(probability if probability > 0.0 else 0.0)), BINS - 1)
    return (min(depth, DEPTHS - 1) * RANKS + min(rank, RANKS - 1)) * BINS + place


class _Node(NamedTuple):
    """A candidate: its ``chance`` of being accepted, its ``parent`` candidate, and its ``row`` of its level."""

    chance: float
    parent: int
    row: int


class _Growth:
    """The candidates of one step, and which of them the head went on from.

    Attributes:
        nodes: the candidates; places, tokens: theirs.
        rows: of each node that was forwarded (the root is), its level below and its row there.
    """

    def __init__(self) -> None:
        self.levels: list[Level] = []
        self.nodes: list[_Node] = []
        self.places: list[int] = []
        self.tokens: list[int] = []
        self.rows = {ROOT: (0, 0)}
        self._seen: dict[int, list[int]] = {ROOT: []}  # of a forwarded node, what it sees of those

    def add(self, level: Level, parents: list[int], confidence: Confidence) -> list[int]:
        """Take a level in; its candidates, the likeliest first."""
        first, depth = len(self.nodes), len(self.levels)
        self.levels.append(level)
        for row, (parent, probabilities) in enumerate(zip(parents, level.probabilities, strict=True)):
            above = 1.0 if parent == ROOT else self.nodes[parent].chance
            chances = [above * confidence.of(depth, rank, value) for rank, value in enumerate(probabilities)]
            self.nodes += [_Node(chance, parent, row) for chance in chances]
        self.places += itertools.chain.from_iterable(level.places)
        self.tokens += itertools.chain.from_iterable(level.tokens)
        return sorted(range(first, len(self.nodes)), key=lambda index: -self.nodes[index].chance)

    def forward(self, chosen: list[int]) -> Nodes:
        """Go on from some of the last level's candidates."""
        before = len(self._seen) - 1
        for row, index in enumerate(chosen):
            self.rows[index] = len(self.levels), row
            self._seen[index] = [*self._seen[self.nodes[index].parent], before + row]
        parents = [self.nodes[index].row for index in chosen]
        places, tokens = ([part[i] for i in chosen] for part in (self.places, self.tokens))
        return Nodes(parents, places, tokens, list(self._seen.values())[1:])


_LINE = Curve((1, 64), (1.0, 3.0))
COMMON = Costs(1.0, _LINE, _LINE, 0.09, Curve((1, 4), (0.07, 0.08)))  # of no machine, and like those of many


class Paying:
    """Grows the drafts of one sequence, and learns from what became of them.

    By costs measured beforehand and by acceptance alone, never by the clock: the same prompts give the same drafts.

    Args:
        costs: of steps of one batch row.
        nodes: the most of a draft.
        depth: most levels.
        top_k: most candidates of a node.
    """

    def __init__(self, costs: Costs, nodes: int, depth: int, top_k: int) -> None:
        self.nodes, self.depth, self.top_k = nodes, depth, top_k
        self.confidence = Confidence()
        self._child = [0.6] * DEPTHS  # the mean confidence in a forwarded node's first candidate, by depth
        self._sums: list[float]  # of drafted steps at these costs: tokens and seconds, fading, and how many they were
        self._known: dict[Costs, list[float]] = {}  # the same at others
        self.reckon(costs)
        self._promised = [0.0, 0.0, 0.0]
        self._steps = self._probe_at = self._drafted_at = 0
        self._pays = True
        self._grown = _Growth()
        self._rows: dict[int, int] = {}  # row of the forward -> node

    def begin(self) -> None:
        """Another text, of which the prompt is taken in before it is decoded."""
        self._drafted_at = self._steps

    def reckon(self, costs: Costs) -> None:
        """Go by these costs from now on: those of the present length, at each of which drafts may pay or not."""
        self.costs, self._sums = costs, self._known.setdefault(costs, [0.0, 0.0, 0.0])
        self._rows_cost = [costs.verify.at(1 + count) - costs.plain for count in range(1, self.nodes + 1)]
        self._pass = costs.draft.at(1)

    @property
    def speedup(self) -> float:
        """Of drafted steps over plain ones, as far as is known."""
        tokens, seconds, _ = self._sums
        return tokens / seconds * self.costs.plain if seconds else 1.0

    @property
    def tried(self) -> bool:
        """Whether enough steps were drafted at these costs to tell."""
        return self._sums[2] >= FIRST

    def wants(self, depth: int) -> bool:
        """Whether the next step should draft, of at most ``depth`` levels; if not, it is a plain one."""
        pays = not self.tried or self.speedup >= WORTH
        if pays != self._pays:
            logging.getLogger(__name__).info("drafts: %s", "as they pay" if pays else "none, since none pays")
            self._pays, self._probe_at = pays, self._steps + 8
        if depth < 1 or (not pays and self._steps < self._probe_at):
            self._rows = {}
            self._count(1.0, self.costs.plain)
            return False
        if not pays:
            self._probe_at = self._steps + probe_after(1.0 - self.speedup + self._late / self.costs.plain)
        return True

    def grow(self, passes: Passes, depth: int, device: torch.device) -> DraftTree:
        """A draft of at most ``depth`` levels."""
        grown = self._grown = _Growth()
        late, self._drafted_at = self._late, self._steps + 1
        seconds, parents, level = self.costs.first, [ROOT], passes.first(self.top_k)
        while True:
            likely = self._look(level, parents)
            if len(grown.levels) == min(depth, self.depth):
                break
            count, more = self._worth_a_pass(likely)
            if not count:
                break
            seconds, parents = seconds + more, likely[:count]
            level = passes.further(grown.forward(parents), self.top_k)
        return self._keep(seconds, late, device)

    def rehearse(self, passes: Passes, count: int) -> object:
        """Go on from ``count`` candidates of some first level as ``grow`` does, whatever it is worth: to be timed."""
        grown, ranks = _Growth(), list(range(self.top_k))
        self._grown, first = grown, Level([ranks], [ranks], [[0.5 / (rank + 1) for rank in ranks]])
        likely = grown.add(first, [ROOT], self.confidence)
        self._worth_a_pass(likely)
        return self._look(passes.further(grown.forward(likely[:count]), self.top_k), likely[:count])

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> int | None:
        """From the accepted ``path`` of [root, nodes] and the target's choice after each of its rows; returns which of
        the first level's candidates the first of these was, if one."""
        for row, token in zip(path, tokens, strict=True):
            where = self._grown.rows.get(self._rows.get(row, ROOT - 1))
            if where is None:
                break
            level, place = self._grown.levels[where[0]], where[1]
            candidates = zip(level.tokens[place], level.probabilities[place], strict=True)
            for rank, (candidate, probability) in enumerate(candidates):
                self.confidence.learn(where[0], rank, probability, candidate == token)
        first = self._grown.levels[0].tokens[0]
        return first.index(tokens[0]) if tokens[0] in first else None

    def promised(self) -> Promised:
        """For all steps so far."""
        steps, tokens, plain = self._promised
        return Promised(steps, tokens, plain, "trees that grow while they pay" if self._pays else "no draft")

    # ------------------------------------------------------------------------------------------- a step's parts

    @property
    def _worth(self) -> float:
        """Seconds that a token is worth."""
        return self.costs.plain / max(self.speedup, 1.0)

    @property
    def _late(self) -> float:
        """Seconds that a draft takes longer now for the steps without one before it."""
        return self.costs.late * (self._steps - self._drafted_at)

    def _look(self, level: Level, parents: list[int]) -> list[int]:
        """Take in the candidates below these nodes; the likeliest first."""
        depth = len(self._grown.levels)
        kind = min(depth, DEPTHS - 1)
        for probabilities in level.probabilities:
            self._child[kind] += 0.05 * (self.confidence.of(depth, 0, probabilities[0]) - self._child[kind])
        return self._grown.add(level, parents, self.confidence)

    def _worth_a_pass(self, likely: list[int]) -> tuple[int, float]:
        """How many of the last level's nodes to go on from, the likeliest first, and what the pass takes; none if no
        number of further levels pays.

        What comes after is guessed: a first child of every node, and below the likeliest one a chain. Once a further
        level of that does not pay, none does: it is less likely, and takes as long.
        """
        nodes, levels, worth = self._grown.nodes, len(self._grown.levels), self._worth
        chances = sorted((node.chance for node in nodes), reverse=True)[:SIGHT]
        known, best = self._value(chances, worth)[0], (0.0, 0, 0.0)
        for count in range(1, min(len(likely), FRONTIER) + 1):
            first = seconds = self.costs.draft.at(count)
            further = [nodes[index].chance * self._child[min(levels, DEPTHS - 1)] for index in likely[:count]]
            before = -math.inf
            for depth in range(levels + 1, self.depth + 1):
                if sum(further) * worth - seconds > best[0]:  # else not even if their rows cost nothing
                    gain = self._value(sorted(chances + further, reverse=True), worth)[0] - known - seconds
                    best = max(best, (gain, count, first))
                    if gain <= before:
                        break
                    before = gain
                further.append(further[-1 if depth > levels + 1 else 0] * self._child[min(depth, DEPTHS - 1)])
                seconds += self._pass
        return best[1], best[2]

    def _value(self, chances: list[float], worth: float) -> tuple[float, int]:
        """Of nodes with these chances, the likeliest first: most seconds that verifying them saves, and how many."""
        best, at, gained = 0.0, 0, 0.0
        for count, chance in enumerate(chances[: self.nodes]):
            gained += chance * worth
            saved = gained - self._rows_cost[count]
            if saved > best:
                best, at = saved, count + 1
        return best, at

    def _keep(self, seconds: float, late: float, device: torch.device) -> DraftTree:
        """The draft of those candidates whose row pays; drafting took ``seconds``, and ``late`` more."""
        nodes = self._grown.nodes
        order = sorted(range(len(nodes)), key=lambda index: -nodes[index].chance)[: self.nodes]
        kept = sorted(order[: self._value([nodes[index].chance for index in order], self._worth)[1]])
        number = {index: place for place, index in enumerate(kept)} | {ROOT: ROOT}
        parents = [number[nodes[index].parent] for index in kept]
        curve = self.costs.chain if parents == list(range(ROOT, len(kept) - 1)) else self.costs.verify
        tokens = 1.0 + sum(nodes[index].chance for index in kept)
        seconds += curve.at(1 + len(kept)) if kept else self.costs.plain
        self._sums[:] = MEMORY * self._sums[0] + tokens, MEMORY * self._sums[1] + seconds, self._sums[2] + 1
        self._count(tokens, seconds + late)
        self._rows = {place + 1: index for index, place in number.items()}
        if not kept:
            return DraftTree.empty(1, device)
        return DraftTree.from_parents(torch.tensor([[self._grown.tokens[i] for i in kept]], device=device), parents)

    def _count(self, tokens: float, seconds: float) -> None:
        self._steps += 1
        for place, value in enumerate((1.0, tokens, seconds / self.costs.plain)):
            self._promised[place] += value
