"""How much of a copy to draft: as many copied tokens as are profitable, by how often such copies were right.

A copied token is counted by the length of its match and by its share of the occurrences (``Copy``). Each step, the
policy compares plain decoding, a head's draft and copies of every size. It maximises expected tokens - pace * step
time, where pace is the average number of tokens per unit of time: so it maximises tokens per second (Dinkelbach 1967).
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from drafters.base import Drafter, Expected
from drafters.config import Config
from drafters.drafting.retrieval import NOTHING, Copy, part_of
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT, DraftTree
from drafters.policy.costs import Curve, context_limit, context_limits, step_times
from drafters.policy.shape import Fraction, Shape

if TYPE_CHECKING:
    from drafters.loop.acceptance import Verdict
    from drafters.loop.state import DecodeState
    from drafters.model.target import TargetModel

MATCHES = (1, 2, 3, 4, 8, 16)  # upper limits of the classes of match lengths, in tokens
SHARES = (0.1, 0.2, 0.4, 0.7)  # upper limits of the classes of shares
MATCH_POWER = 1.8  # prior: share ** (1.8 / match), tuned on SmolLM2's answers: 0.29, 0.54, 0.86 at matches 1, 2, 8
FADE = 0.97  # weight of the past, per step, in the average step
MOST = 64  # copied tokens of a draft
ROWS = (0, 1, 3, 7, 15, 31, 63)  # sizes of the drafts that costs are measured with


class CopyRates:
    """How often a copied token is the target's, by the length of its match and its share (``Copy``)."""

    def __init__(self) -> None:
        self._counts = [[Fraction() for _ in range(len(SHARES) + 1)] for _ in range(len(MATCHES) + 1)]

    def of(self, match: int, share: float) -> float:
        """P(the copied token is right | the tokens before it were)."""
        return self._count(match, share).value(share ** (MATCH_POWER / match))

    def learn(self, match: int, share: float, right: bool) -> None:
        """Count one copied token."""
        self._count(match, share).learn(right)

    def _count(self, match: int, share: float) -> Fraction:
        return self._counts[bisect_left(MATCHES, match)][bisect_left(SHARES, share)]

    def chances(self, copy: Copy) -> list[tuple[float, int]]:
        """``(chance of being accepted, node)`` of each node, the likeliest first: no child before its parent."""
        chances: list[float] = []
        matches: list[int] = []
        for parent, share in zip(copy.parents, copy.shares, strict=True):
            # The token behind a copied token continues a match that is longer by one.
            matches.append(copy.match if parent == ROOT else matches[parent] + 1)
            chances.append((1.0 if parent == ROOT else chances[parent]) * self.of(matches[-1], share))
        return sorted(((chance, node) for node, chance in enumerate(chances)), key=lambda pair: -pair[0])


class _FixedDraft(Drafter):
    """Drafts a chain of ``size`` zeros, to measure steps with."""

    name = "fixed draft"
    max_batch = None

    def __init__(self, target: "TargetModel", most: int) -> None:
        super().__init__(target, Config())
        self.max_draft, self.size = most, 0

    def propose(self, state: "DecodeState") -> DraftTree:
        size = state.longest_draft(self.size)
        zeros = torch.zeros(state.batch, size, dtype=torch.long, device=self.target.device)
        return DraftTree.chain(zeros) if size else state.nothing


class CopyPolicy:
    """Cuts each sequence's copy to what is profitable. It reads costs and acceptance, never the clock."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, Sampling, int], Curve] = {}
        self._sums = [0.0, 0.0, 0.0, 0.0]  # of all generations: steps, tokens, plain steps, steps with a copy
        self.begin()

    def begin(self) -> None:
        """Forget which copies were right, and the average step."""
        self.rates = CopyRates()
        self._tokens = self._time = 1.0  # of the average step; time in units of a plain step

    def prepare(self, drafter: Drafter, batch: int, sampling: Sampling, longest: int) -> None:
        """Measure the costs of sequences of up to ``longest`` tokens, unless they are known."""
        fixed = _FixedDraft(drafter.target, min(MOST, drafter.max_draft))
        sizes, use = [size for size in ROWS if size <= fixed.max_draft], partial(setattr, fixed, "size")
        for limit in context_limits(drafter.target, longest):
            if (batch, sampling, limit) not in self._costs:
                times = step_times(fixed, sizes, use, batch, sampling, limit, longest, {"method": fixed.name})
                rest = {1 + size: time.rest for size, time in zip(sizes, times, strict=True)}
                self._costs[batch, sampling, limit] = Curve.of(rest)

    def select(self, copies: list[Copy], state: "DecodeState", other: Shape | None = None) -> list[Copy]:
        """Cut each sequence's copy to its likeliest nodes, equally many in each; nothing where that is not profitable.

        Args:
            other: alternative to copying; by default a step without a draft.
        """
        other = other or Shape()
        curve = self._curve(state)
        ordered = [self.rates.chances(copy) for copy in copies]
        unfinished, pace = max(state.finished.count(False), 1), self._tokens / self._time
        # Dinkelbach: maximise tokens / time by maximising tokens - pace * time.
        best, count, chosen = other.tokens - pace * other.plain_steps, 0, other
        tokens = 1.0
        for place in range(min(max(map(len, ordered)), MOST)):
            tokens += sum(nodes[place][0] for nodes in ordered if place < len(nodes)) / unfinished
            plain_steps = curve.at(place + 2) / curve.at(1)
            if tokens - pace * plain_steps > best:
                best, count, chosen = tokens - pace * plain_steps, place + 1, Shape((), tokens, plain_steps)
        self._add_step(chosen, bool(count))
        if not count:
            return [NOTHING] * len(copies)
        pairs = zip(copies, ordered, strict=True)
        return [part_of(copy, sorted(node for _, node in nodes[:count])) for copy, nodes in pairs]

    def learn(self, copies: list[Copy], verdict: "Verdict") -> None:
        """Learn from committed tokens which copied tokens were right, drafted or not."""
        for copy, tokens in zip(copies, verdict.tokens, strict=True):
            at, match = ROOT, copy.match
            for token in tokens:
                nodes = [node for node, parent in enumerate(copy.parents) if parent == at]
                for node in nodes:
                    self.rates.learn(match, copy.shares[node], copy.tokens[node] == token)
                at = next((node for node in nodes if copy.tokens[node] == token), ROOT - 1)
                match += 1
                if at < ROOT:
                    break

    def expected(self) -> Expected | None:
        """Expected tokens and time of all steps so far; None before the first."""
        steps, tokens, plain_steps, copied = self._sums
        return Expected(steps, tokens, plain_steps, f"{copied / steps:.0%} of the steps copied") if steps else None

    def _curve(self, state: "DecodeState") -> Curve:
        return self._costs[state.batch, state.sampling, context_limit(state.target, state.length)]

    def _add_step(self, step: Shape, copied: bool) -> None:
        self._tokens = FADE * self._tokens + (1 - FADE) * step.tokens
        self._time = FADE * self._time + (1 - FADE) * step.plain_steps
        more: Sequence[float] = (1.0, step.tokens, step.plain_steps, float(copied))
        self._sums = [before + value for before, value in zip(self._sums, more, strict=True)]
