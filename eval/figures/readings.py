"""Is the acceptance served the acceptance trained? An engine and our loop on the same prompts, with standard errors.

Acceptance at a position is pooled: accepted over drafted tokens there, over all drafts of all prompts. Cumulative
counts all drafts of that length; conditional those whose tokens before were accepted. It does not see shorter or
missing drafts, so tau and the drafted tokens of a step are compared, too. Steps of one prompt depend on each other, so
errors are those of a ratio of sums over prompts (Cochran 1977, Sampling Techniques, chapter 6). Two readings of a head
decode the same texts, so the error of their difference is taken over the prompts' own differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from drafters.loop.generate import Step
from eval.measure.runs import Outcome

MOST_APART = 2.0  # standard errors of a difference that chance explains
AS_LOADED = "as loaded"
SHORTER = "shorter drafts"
CHECK_LENGTH = "num_speculative_tokens of the engine, and max_position_embeddings of the exported config.json"


class Rate(NamedTuple):
    """A share, or tau, and its standard error over prompts."""

    value: float
    error: float


def pooled(hits: Sequence[float], tries: Sequence[float]) -> Rate | None:
    """Return the ratio of the sums over prompts; None if nothing was tried.

    The error is at least one hit more or less: no draft accepted in all prompts does not mean none ever.
    """
    over, under = np.array(hits, dtype=float), np.array(tries, dtype=float)
    if not (total := under.sum()):
        return None
    value, n = over.sum() / total, len(over)
    spread = np.square(over - value * under).sum() * n / max(n - 1, 1)
    return Rate(float(value), float(max(math.sqrt(spread), 1.0) / total))


def apart(one: Rate | None, other: Rate | None) -> float:
    """Return the difference in standard errors; 0 if one of the two is not known."""
    if one is None or other is None:
        return 0.0
    return (one.value - other.value) / math.hypot(one.error, other.error)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts of up to K tokens.

    Attributes:
        drafted: draft tokens of a step, over the steps that have room for K.
        cumulative, conditional: rates by position, ``[K]``; None where no draft is as long, or none got there.
    """

    tau: Rate | None
    drafted: Rate | None
    cumulative: list[Rate | None]
    conditional: list[Rate | None]


def acceptance(outcomes: Sequence[Outcome], depth: int) -> Acceptance:
    """Return the figures of decoded prompts, for ``depth`` positions; every outcome has a trace of one prompt."""
    prompts = [outcome.trace.steps for outcome in outcomes if outcome.trace is not None]

    def share(at: int, reached: int) -> Rate | None:
        """Share that accepts position ``at``, among drafts as long that accept ``reached`` tokens."""
        counted = [[step for step in steps if step.depth > at and step.accepted >= reached] for steps in prompts]
        return pooled([sum(step.accepted > at for step in steps) for steps in counted], list(map(len, counted)))

    committed = [sum(step.committed for step in steps) for steps in prompts]
    tau = pooled(committed, [sum(step.forwards for step in steps) for steps in prompts])
    # Near the end of a text our loop drafts no more than fits, and engines may draft K tokens.
    roomy = [[step for start, step in _by_start(one, len(one.tokens) - depth - 1)] for one in outcomes]
    drafted = pooled([sum(step.depth for step in steps) for steps in roomy], list(map(len, roomy)))
    return Acceptance(tau, drafted, [share(at, 0) for at in range(depth)], [share(at, at) for at in range(depth)])


def agreement(ones: Sequence[Outcome], others: Sequence[Outcome]) -> Rate | None:
    """Return the share of equal steps of two runs over the same prompts: drafts after equal texts, equally accepted.

    It tells apart faults of equal acceptance. None if no step of the two follows the same text.
    """
    hits, tries = [], []
    for one, other in zip(ones, others, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=False)))
        ours, theirs = (
            {start: step for start, step in _by_start(outcome, same) if step.depth} for outcome in (one, other)
        )
        both = [(step, theirs[start]) for start, step in ours.items() if start in theirs]
        both = [(a, b) for a, b in both if a.depth == b.depth]
        hits.append(sum(a.accepted == b.accepted for a, b in both))
        tries.append(len(both))
    return pooled(hits, tries)


def _by_start(outcome: Outcome, upto: int) -> list[tuple[int, Step]]:
    """The steps with at most ``upto`` tokens before them, and the number of these tokens."""
    steps, start = [], outcome.first_tokens
    for step in outcome.trace.steps if outcome.trace is not None else ():
        if start <= upto:
            steps.append((start, step))
        start += step.committed
    return steps


@dataclass(frozen=True)
class Reading:
    """Our loop with one reading of the head, beside an engine.

    Attributes:
        name: ``AS_LOADED``, or the mistake planted in it. check: where to look for that.
        apart: the engine's cumulative acceptance minus this one's by position, in standard errors.
        tau_apart: the same for tau. drafted_apart: the same for the drafted tokens of a step.
        alike: ``agreement`` with the engine; None if it decoded other prompts.
    """

    name: str
    check: str
    acceptance: Acceptance
    apart: list[float]
    tau_apart: float
    drafted_apart: float
    alike: Rate | None = None

    @property
    def as_long(self) -> bool:
        """True if chance explains the difference of the drafts' lengths."""
        return abs(self.drafted_apart) <= MOST_APART

    @property
    def within(self) -> bool:
        """True if chance explains the differences at all positions, and that of tau between drafts of equal length."""
        taus = [self.tau_apart] if self.as_long else []
        return all(abs(gap) <= MOST_APART for gap in self.apart + taus)

    @property
    def distance(self) -> float:
        """Sum of the squared differences."""
        return sum(gap * gap for gap in self.apart)


def reading(
    name: str, check: str, ours: Sequence[Outcome], theirs: Sequence[Outcome], depth: int, paired: bool = True
) -> Reading:
    """Compare a reading with what an engine did; ``paired``: whether both have the same prompts."""
    loop, engine = acceptance(ours, depth), acceptance(theirs, depth)
    gaps = [apart(one, other) for one, other in zip(engine.cumulative, loop.cumulative, strict=True)]
    more = apart(engine.tau, loop.tau), apart(engine.drafted, loop.drafted)
    return Reading(name, check, loop, gaps, *more, agreement(ours, theirs) if paired else None)


def explaining(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings that reproduce an engine's acceptance, the best first; several if they cannot be told apart.

    On the same prompts they are told apart by ``agreement``.
    """
    fitting = sorted((one for one in readings if one.within), key=lambda one: one.distance)
    best = max((one.alike for one in fitting if one.alike is not None), default=None)
    if best is None:
        return fitting
    fitting = [one for one in fitting if apart(best, one.alike) <= MOST_APART]
    return sorted(fitting, key=lambda one: -one.alike.value if one.alike is not None else 0.0)


def gain(ones: Sequence[Outcome], others: Sequence[Outcome]) -> Rate:
    """Return how much higher the tau of ``others`` is than that of ``ones`` on the same prompts, with its error.

    The error is at least that of one forward more or less. A prompt without steps counts as no difference.
    """
    taus, parts = [], []
    for outcomes in (ones, others):
        steps = [outcome.trace.steps if outcome.trace is not None else [] for outcome in outcomes]
        committed = np.array([sum(step.committed for step in of_prompt) for of_prompt in steps], dtype=float)
        forwards = np.array([sum(step.forwards for step in of_prompt) for of_prompt in steps], dtype=float)
        total = max(forwards.sum(), 1.0)
        taus.append(committed.sum() / total)
        parts.append((committed - taus[-1] * forwards) / total)  # each prompt's part in the error of tau
    n = len(ones)
    spread = np.square(parts[1] - parts[0]).sum() * n / max(n - 1, 1)
    return Rate(float(taus[1] - taus[0]), float(max(math.sqrt(spread), taus[0] / total)))


def most_accepted(outcomes: dict[str, Sequence[Outcome]]) -> list[str]:
    """Return the names of the readings with the highest tau: all that are not ``MOST_APART`` below the first.

    ``outcomes``: outcomes of each reading on the same prompts.
    """
    loaded = next(iter(outcomes.values()))
    order = sorted(outcomes, key=lambda name: -gain(loaded, outcomes[name]).value)
    below = {name: gain(outcomes[name], outcomes[order[0]]) for name in order}
    return [name for name, rate in below.items() if rate.value <= MOST_APART * rate.error]


def prompts_needed(rate: Rate, prompts: int) -> int | None:
    """Return how many prompts like these would show a gain as large as ``rate``; None if the gain is 0."""
    return math.ceil(prompts * (MOST_APART * rate.error / rate.value) ** 2) if rate.value else None


def as_json(figures: Acceptance) -> dict[str, Any]:
    """Return the figures as ``parity.json`` holds them."""

    def one(rate: Rate | None) -> dict[str, float] | None:
        return None if rate is None else rate._asdict()

    by_position = {"cumulative": figures.cumulative, "conditional": figures.conditional}
    whole = {"tau": one(figures.tau), "drafted": one(figures.drafted)}
    return whole | {name: [one(rate) for rate in rates] for name, rates in by_position.items()}
