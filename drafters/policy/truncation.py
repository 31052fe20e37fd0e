"""How many tokens of a drafted block to verify: a position is verified while its expected gain is profitable.

DSpark (DeepSeek 2026, Algorithm 1) admits positions by cumulative confidence while tokens per second rise. The decision
for a position may use the tokens before it, and no later ones: whether a draft token is verified would otherwise depend
on the token, which changes the output's distribution. So the walk goes from the first position on, and stops at the
first that is not profitable; it never looks at the whole block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from drafters.base import Expected
from drafters.drafting.tree_plan import TreePlan
from drafters.policy.costs import Curve, MeasuredCosts, PlanTime, context_limit

if TYPE_CHECKING:
    from drafters.loop.acceptance import Verdict
    from drafters.loop.state import DecodeState

EXPLORE = 32  # with the online estimate, one step in this many verifies the whole block, to learn about its end
FADE = 0.98  # of the average tokens and time of a step, per step
LEARNING_RATE = 0.01  # of the online estimate, per token
SLOPE, BIAS = 0.5, -0.2  # where the online estimate begins; vLLM 0.32 begins there
MOST = 8.0  # largest logit that the online estimate reads; the fit of its first temperatures bounds them, too


class OnlineAcceptance:
    """Logistic estimate of each position's acceptance from the logit of max q, fitted while decoding.

    max q belongs to the position's distribution, which the tokens before it determine. With fitted ``temperatures`` it
    begins with those.
    """

    def __init__(self, depth: int, temperatures: Sequence[float] | None = None) -> None:
        self._weights = [[SLOPE, BIAS] if temperatures is None else [1 / temperatures[k], 0.0] for k in range(depth)]

    def values(self, logits: list[float]) -> list[float]:
        """Estimated acceptance of the first positions, each given that those before it are accepted."""
        return [self._value(place, logit) for place, logit in enumerate(logits)]

    def learn(self, place: int, logit: float, accepted: bool) -> None:
        """One step of gradient descent on the log-loss of one verified position."""
        error = LEARNING_RATE * (accepted - self._value(place, logit))
        slope, bias = self._weights[place]
        self._weights[place] = [slope + error * _bounded(logit), bias + error]

    def _value(self, place: int, logit: float) -> float:
        slope, bias = self._weights[place]
        return _sigmoid(slope * _bounded(logit) + bias)


@dataclass
class Costs:
    """Seconds of a step: of its ``draft``, and of the ``rest`` by number of tokens (root included)."""

    draft: float
    rest: Curve


class Truncation(MeasuredCosts):
    """Cuts the chains of a batch to a common length. It reads costs and acceptance, never the clock.

    Sequences of a batch do not depend on each other, so that the length of one may depend on the tokens of all others.
    The block is drafted in every step; ``tree: auto`` skips drafts that are not profitable.

    Args:
        depth: most tokens of a draft.
        trained: the drafter's estimates come from a trained confidence head; otherwise they are logits of max q.
        temperatures: divisors of the estimates' logits, for at least ``depth`` positions; None: not fitted.
    """

    def __init__(self, depth: int, trained: bool, temperatures: Sequence[float] | None = None) -> None:
        super().__init__()
        self.depth, self.trained, self.temperatures = depth, trained, temperatures
        self._sums = [0.0, 0.0, 0.0, 0.0]  # of all generations: steps, tokens, plain steps, drafted tokens
        self.begin()

    def begin(self) -> None:
        """Forget the online estimate and the average step."""
        self._online = OnlineAcceptance(self.depth, self.temperatures)
        self._latest: list[list[float]] = []  # logits of the latest draft, by sequence
        self._steps = 0
        self._tokens = self._time = 1.0  # of the average step; time in units of a step without a draft

    def _plans(self) -> list[int]:
        return sorted({0, 1, self.depth // 2, self.depth})

    def _costs_of(self, plans: Sequence[int], times: Sequence[PlanTime]) -> Costs:
        rest = Curve.of({1 + length: time.rest for length, time in zip(plans, times, strict=True)})
        return Costs(max(time.draft for time in times), rest)

    def length(self, certainty: Tensor, state: "DecodeState") -> int:
        """Number of tokens of the chains ``[B, D]`` to verify; ``certainty``: estimated acceptance as logits."""
        if self._forced is not None:
            return min(self._forced, certainty.shape[1])
        self._latest = certainty.tolist()
        unfinished = [row for row, done in zip(self._latest, state.finished, strict=True) if not done]
        chances = [self.acceptance(row) for row in unfinished]
        costs: Costs = self._costs[state.batch, state.sampling, context_limit(state.target, state.length)]
        plain = costs.rest.at(1)
        self._steps += 1
        explores = not self.trained and self._steps % EXPLORE == 0
        pace, tokens, count = self._tokens / self._time, 1.0, 0
        paths = [1.0] * len(chances)  # chance of each sequence that the positions so far are accepted
        while count < certainty.shape[1]:
            paths = [path * row[count] for path, row in zip(paths, chances, strict=True)]
            gain = sum(paths) / len(paths)
            more = (costs.rest.at(count + 2) - costs.rest.at(count + 1)) / plain
            if gain <= pace * more and not explores:
                break
            tokens, count = tokens + gain, count + 1
        time = (costs.draft + costs.rest.at(count + 1)) / plain
        self._tokens = FADE * self._tokens + (1 - FADE) * tokens
        self._time = FADE * self._time + (1 - FADE) * time
        step = 1.0, tokens, time, float(count)
        self._sums = [before + more for before, more in zip(self._sums, step, strict=True)]
        return count

    def acceptance(self, logits: list[float]) -> list[float]:
        """Estimated acceptance of a draft's positions, each given that those before it are accepted."""
        if self.trained:
            scales = self.temperatures or [1.0] * self.depth
            return [_sigmoid(logit / scale) for logit, scale in zip(logits, scales, strict=False)]
        return self._online.values(logits)

    def learn(self, plan: TreePlan, size: int, state: "DecodeState", verdict: "Verdict") -> None:
        """Learn from the verdict on chains of ``size`` tokens, the first of a plan."""
        if self.trained or self._forced is not None:
            return
        for row, logits in enumerate(self._latest):
            if state.finished[row]:  # cut short
                continue
            accepted = len(verdict.rows[row]) - 1
            for place in range(min(accepted + 1, size)):
                self._online.learn(place, logits[place], place < accepted)

    def expected(self) -> Expected | None:
        """Expected tokens and time of all steps so far; None before the first."""
        steps, tokens, plain_steps, drafted = self._sums
        return Expected(steps, tokens, plain_steps, f"{drafted / steps:.1f} tokens a draft") if steps else None


def _bounded(logit: float) -> float:
    return min(max(logit, -MOST), MOST)


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(logit, -60.0), 60.0)))
