"""How much of a copy to draft: as many copied tokens as are profitable, by how often such copies were right.

A copied token is counted by the length of its match and by its share of the places found (``Copy``). Each step, the
policy compares plain decoding, a head's draft and copies of every size. It maximises expected tokens - pace * step
time, where pace is the average number of tokens per unit of time: so it maximises tokens per second (Dinkelbach 1967).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from drafters.base import Drafter, Expected
from drafters.config import Config
from drafters.drafting.one_tree import Overlap
from drafters.drafting.retrieval import NOTHING, Copy, part_of
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT, DraftTree
from drafters.policy.costs import (
    Curve,
    cached,
    context_limit,
    context_limits,
    measuring_context,
    time_plans,
    time_within_memory,
)
from drafters.policy.shape import PRIOR_TRIALS, WINDOW, Shape

if TYPE_CHECKING:
    from drafters.loop.acceptance import Verdict
    from drafters.loop.state import DecodeState
    from drafters.model.target import TargetModel

MATCHES = (1, 2, 3, 4, 8, 16)  # limits of the kinds of match lengths, in tokens
CLAIMS = (0.1, 0.2, 0.4, 0.7)  # limits of the kinds of shares
MATCH_POWER = 1.8  # prior: claim ** (1.8 / match), tuned on SmolLM2's answers: 0.29, 0.54, 0.86 at matches 1, 2, 8
FADE = 0.97  # weight of the past, per step, in the average step
MOST = 64  # copied tokens of a draft
ROWS = (0, 1, 3, 7, 15, 31, 63)  # sizes of the drafts that costs are measured with


class CopyRates:
    """How often a copied token is the target's, by the length of its match and its claim."""

    def __init__(self) -> None:
        kinds = (len(MATCHES) + 1) * (len(CLAIMS) + 1)
        self._tried, self._right = [0.0] * kinds, [0.0] * kinds

    def of(self, match: int, claim: float) -> float:
        """P(the copied token is right | the tokens before it were)."""
        kind = self._kind(match, claim)
        prior = claim ** (MATCH_POWER / match)
        return (self._right[kind] + PRIOR_TRIALS * prior) / (self._tried[kind] + PRIOR_TRIALS)

    def learn(self, match: int, claim: float, right: bool) -> None:
        """Count one copied token."""
        kind = self._kind(match, claim)
        if self._tried[kind] >= WINDOW:
            self._tried[kind] *= 1 - 1 / WINDOW
            self._right[kind] *= 1 - 1 / WINDOW
        self._tried[kind] += 1.0
        self._right[kind] += right

    @staticmethod
    def _kind(match: int, claim: float) -> int:
        return bisect_left(MATCHES, match) * (len(CLAIMS) + 1) + bisect_left(CLAIMS, claim)

    def chances(self, found: Copy) -> list[tuple[float, int]]:
        """``(chance of being accepted, node)`` of each node, the likeliest first: no child before its parent."""
        chances: list[float] = []
        matches: list[int] = []
        for parent, claim in zip(found.parents, found.shares, strict=True):
            # The token behind a copied token continues a match that is longer by one.
            matches.append(found.match if parent == ROOT else matches[parent] + 1)
            chances.append((1.0 if parent == ROOT else chances[parent]) * self.of(matches[-1], claim))
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
    """Cuts each row's copy to what is profitable. It reads costs and acceptance, never the clock."""

    def __init__(self) -> None:
        self.rates = CopyRates()
        self._costs: dict[tuple[int, Sampling, int], Curve] = {}
        self._tokens = self._time = 1.0  # of the average step; time in units of a plain step
        self._sums = [0.0, 0.0, 0.0, 0.0]  # steps, tokens, plain steps, steps with a copy

    def prepare(self, drafter: Drafter, batch: int, sampling: Sampling, longest: int) -> None:
        """Measure the costs of rows of up to ``longest`` tokens, unless they are known."""
        target, most = drafter.target, min(MOST, drafter.max_draft)
        for limit in context_limits(target, longest):
            if (batch, sampling, limit) in self._costs:
                continue
            fixed, sizes = _FixedDraft(target, most), [size for size in ROWS if size <= most]
            context = measuring_context(limit, longest, drafter)
            key = {"copies": sizes, "batch": batch, "context": context, "greedy": sampling.greedy}
            key |= {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1}

            def use(size: int, fixed: _FixedDraft = fixed) -> None:
                fixed.size = size

            def measure(given: Any = (fixed, sizes, use, context)) -> Any:
                fixed, sizes, use, context = given
                return time_within_memory(
                    context, lambda length: time_plans(target, fixed, sizes, use, batch, sampling, length)
                )

            times = cached(target, key, measure)
            curve = Curve.of({1 + size: rest for size, (_, rest) in zip(sizes, times, strict=True)})
            self._costs[batch, sampling, limit] = curve

    def select(self, found: list[Copy], state: "DecodeState", other: Shape | None = None) -> list[Copy]:
        """Cut each row's copy to its likeliest nodes, equally many in each row; nothing where that is not profitable.

        Args:
            other: what is done instead of copying; by default a step without a draft.
        """
        other = other or Shape()
        curve = self._curve(state)
        ordered = [self.rates.chances(one) for one in found]
        unfinished, pace = max(state.finished.count(False), 1), self._tokens / self._time
        # Dinkelbach: maximise tokens / time by maximising tokens - pace * time.
        best, count, chosen = other.tokens - pace * other.plain_steps, 0, other
        tokens = 1.0
        for place in range(min(max(map(len, ordered)), MOST)):
            tokens += sum(nodes[place][0] for nodes in ordered if place < len(nodes)) / unfinished
            plain_steps = curve.at(place + 2) / curve.at(1)
            if tokens - pace * plain_steps > best:
                best, count, chosen = tokens - pace * plain_steps, place + 1, Shape((), tokens, plain_steps)
        self._count(chosen, bool(count))
        if not count:
            return [NOTHING] * len(found)
        return [
            part_of(one, sorted(node for _, node in nodes[:count])) for one, nodes in zip(found, ordered, strict=True)
        ]

    def beside(self, found: list[Copy], held: list[Overlap], size: int, state: "DecodeState") -> list[list[int]]:
        """Nodes of each row's copy that are profitable behind a head's draft of ``size`` nodes (hybrid ``one_tree``).

        Args:
            held: nodes of each copy that the draft holds already.
        """
        curve, pace = self._curve(state), self._tokens / self._time
        unfinished = max(state.finished.count(False), 1)
        pairs = zip(found, held, strict=True)
        ordered = [[pair for pair in self.rates.chances(one) if pair[1] not in has] for one, has in pairs]
        count = 0
        for place in range(min(max(map(len, ordered)), MOST)):
            more = sum(nodes[place][0] for nodes in ordered if place < len(nodes)) / unfinished
            row = (curve.at(size + place + 2) - curve.at(size + place + 1)) / curve.at(1)
            if more <= pace * row:
                break
            count = place + 1
            self._sums[1], self._sums[2] = self._sums[1] + more, self._sums[2] + row
        return [[node for _, node in nodes[:count]] for nodes in ordered]

    def learn(self, found: list[Copy], verdict: "Verdict") -> None:
        """Learn from committed tokens which of the found tokens were right, drafted or not."""
        for one, tokens in zip(found, verdict.tokens, strict=True):
            at, match = ROOT, one.match
            for token in tokens:
                nodes = [node for node, parent in enumerate(one.parents) if parent == at]
                for node in nodes:
                    self.rates.learn(match, one.shares[node], one.tokens[node] == token)
                at = next((node for node in nodes if one.tokens[node] == token), ROOT - 1)
                match += 1
                if at < ROOT:
                    break

    def expected(self) -> Expected | None:
        """Expected tokens and time of all steps so far; None before the first."""
        steps, tokens, plain_steps, copied = self._sums
        return Expected(steps, tokens, plain_steps, f"{copied / steps:.0%} of the steps copied") if steps else None

    def _curve(self, state: "DecodeState") -> Curve:
        return self._costs[state.batch, state.sampling, context_limit(state.target, state.length)]

    def _count(self, step: Shape, copied: bool) -> None:
        self._tokens = FADE * self._tokens + (1 - FADE) * step.tokens
        self._time = FADE * self._time + (1 - FADE) * step.plain_steps
        more: Sequence[float] = (1.0, step.tokens, step.plain_steps, float(copied))
        self._sums = [before + value for before, value in zip(self._sums, more, strict=True)]
