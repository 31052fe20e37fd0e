"""Choose the static tree (or chain, or no draft) of most expected tokens per second, from costs and acceptance.

Sequoia (Chen et al. 2024) chooses a static tree by the same two figures. It assumes, as we do, that whether the
drafter's candidate of rank r at depth d is the target's token depends on r and d only. Then a node is accepted with the
product of the probabilities along its path, and the best tree of n nodes has the n likeliest paths.
"""

import heapq
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from drafters.base import Expected
from drafters.drafting.tree_plan import TreePlan
from drafters.policy.costs import Curve, MeasuredCosts, PlanTime, context_limit

if TYPE_CHECKING:
    from drafters.loop.acceptance import Verdict
    from drafters.loop.state import DecodeState

Path = tuple[int, ...]  # a node: the ranks of its ancestors and itself among their siblings
Hazards = list[list[float]]  # [depth][rank] P(the candidate is right | its path is accepted, those before it are wrong)
Acceptance = list[list[float]]  # [depth][rank] P(the candidate is right | its path is accepted); never rising with rank
Way = Literal["greedy", "sampled"]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]

# Prior acceptance: of the first candidate, of the second where the first was wrong, and so on.
PRIOR = (0.6, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06)
DEPTH_DECAY = 0.95  # acceptance at a depth without observations, relative to the depth before
PRIOR_TRIALS = 8.0  # trials that the prior counts for
WINDOW = 200.0  # trials that are remembered: the next prompt may be another kind of text
DECIDE = 16  # steps between two decisions
EXPLORE = 32  # where no draft is profitable, one step in this many drafts all the same


class Fraction:
    """How often something was right, from counts that fade."""

    def __init__(self) -> None:
        self._tried = self._right = 0.0

    def learn(self, right: bool) -> None:
        """Count one trial."""
        if self._tried >= WINDOW:
            self._tried, self._right = self._tried * (1 - 1 / WINDOW), self._right * (1 - 1 / WINDOW)
        self._tried, self._right = self._tried + 1.0, self._right + right

    def value(self, prior: float) -> float:
        """The share that was right; ``prior`` counts for ``PRIOR_TRIALS`` trials."""
        return (self._right + PRIOR_TRIALS * prior) / (self._tried + PRIOR_TRIALS)


class Rates:
    """Acceptance of candidates by depth and rank.

    Args:
        prior: prior of the first depths; None takes ``PRIOR``.
    """

    def __init__(self, depths: int, ranks: int, prior: Hazards | None = None) -> None:
        self.ranks = ranks
        rows = (prior or [list(PRIOR)])[:depths]
        self._prior: Hazards = [row[:ranks] + [PRIOR[-1]] * (ranks - len(row)) for row in rows]
        self._counts = [[Fraction() for _ in range(ranks)] for _ in range(depths)]

    def learn(self, depth: int, candidates: int, accepted: int | None) -> None:
        """Of the first ``candidates`` at ``depth``, behind an accepted path, the one of rank ``accepted`` was right."""
        if depth < len(self._counts):
            tried = candidates if accepted is None else accepted + 1
            for rank, count in enumerate(self._counts[depth][:tried]):
                count.learn(rank == accepted)

    def hazards(self) -> Hazards:
        """Counted hazards. A depth without a prior of its own has a little less than the depth before."""
        hazards: Hazards = []
        for depth, counts in enumerate(self._counts):
            has_prior = depth < len(self._prior)
            prior = self._prior[depth] if has_prior else [DEPTH_DECAY * value for value in hazards[-1]]
            hazards.append([count.value(before) for count, before in zip(counts, prior, strict=True)])
        return hazards

    def acceptance(self) -> Acceptance:
        """The same as unconditional probabilities of each rank."""
        return [acceptance_of(row) for row in self.hazards()]


def acceptance_of(hazards: Sequence[float]) -> list[float]:
    """Acceptance of each rank at one depth, from the hazards."""
    acceptance: list[float] = []
    left = 1.0
    for hazard in hazards:
        acceptance.append(min(left * hazard, acceptance[-1] if acceptance else 1.0))
        left *= 1.0 - hazard
    return acceptance


def likeliest(acceptance: Acceptance, depth: int) -> Iterator[tuple[float, Path]]:
    """Nodes of the full tree of ``depth`` levels and all ranks, the likeliest first, with probabilities.

    A node never precedes its parent or an elder sibling, whose probabilities are no smaller.
    """
    heap: list[tuple[float, int, Path, float]] = [(-acceptance[0][0], 1, (0,), 1.0)]
    while heap:
        negative, level, path, before = heapq.heappop(heap)
        yield -negative, path
        if level < depth:
            heapq.heappush(heap, (negative * acceptance[level][0], level + 1, (*path, 0), -negative))
        if (rank := path[-1] + 1) < len(acceptance[level - 1]):
            heapq.heappush(heap, (-before * acceptance[level - 1][rank], level, (*path[:-1], rank), before))


class Costs(NamedTuple):
    """Seconds of a step's parts at one batch size and context length.

    Attributes:
        rest: all of a step but drafting, by number of tokens (root included). first: a draft of one level.
        level: each further level. row: each further node that is extended in a level.
    """

    rest: Curve
    first: float
    level: float
    row: float

    @property
    def plain(self) -> float:
        """Seconds of a step without a draft."""
        return self.rest.at(1)

    def step(self, nodes: int, levels: int, extended: int) -> float:
        """Seconds of a step with a tree of ``nodes`` in ``levels``; ``extended`` nodes have children."""
        if not nodes:
            return self.plain
        return self.rest.at(1 + nodes) + self.first + (levels - 1) * self.level + (extended - levels + 1) * self.row


class Shape(NamedTuple):
    """A static tree, or plain decoding (no paths).

    Attributes:
        tokens: expected tokens of a step, bonus included. plain_steps: its time in units of a step without a draft.
    """

    paths: tuple[Path, ...] = ()
    tokens: float = 1.0
    plain_steps: float = 1.0

    @property
    def speedup(self) -> float:
        """Expected speedup over plain decoding."""
        return self.tokens / self.plain_steps

    @property
    def name(self) -> str:
        """The shape in words."""
        size, depth = len(self.paths), max(map(len, self.paths), default=0)
        return "no draft" if not size else f"a chain of {size}" if size == depth else f"a tree of {size}, {depth} deep"


def best_shape(acceptance: Acceptance, costs: Costs, most_nodes: int) -> Shape:
    """The non-empty static tree of most expected tokens per second."""
    best, most = Shape(), 0.0
    chain = [row[:1] for row in acceptance]
    for some, depth in [(chain, len(chain)), *((acceptance, depth) for depth in range(1, len(acceptance) + 1))]:
        paths, tokens, inner, deepest = [], 1.0, set[Path](), 0
        for probability, path in likeliest(some, depth):
            paths.append(path)
            tokens += probability
            deepest = max(deepest, len(path))
            if len(path) > 1:
                inner.add(path[:-1])
            plain_steps = costs.step(len(paths), deepest, len(inner)) / costs.plain
            if tokens / plain_steps > most:
                best, most = Shape(tuple(paths), tokens, plain_steps), tokens / plain_steps
            if len(paths) == most_nodes or probability < 0.01:
                break
    return best


class ShapePolicy(MeasuredCosts):
    """Chooses the shape of each draft. It reads costs and acceptance, never the clock: equal seeds give equal drafts.

    Args:
        most_nodes, depths, ranks: bounds of the tree.
        priors: hazards by "greedy" and "sampled".
    """

    def __init__(self, most_nodes: int, depths: int, ranks: int, priors: dict[Way, Hazards] | None = None) -> None:
        super().__init__()
        self.most_nodes, self.depths, self.ranks, self._priors = most_nodes, depths, ranks, priors or {}
        self._sums = [0.0, 0.0, 0.0]  # of all generations: steps, tokens, plain steps
        self.begin()

    def begin(self) -> None:
        """Forget the counted acceptance and the choice."""
        self._rates: Rates | None = None
        self._shape = self._best = Shape()  # the choice, and what is explored where the choice is no draft
        self._steps = self._decide_at = 0

    def _plans(self) -> list[tuple[Path, ...]]:
        """No draft, chains, and two trees: what costs are measured with."""
        lengths = sorted({1, min(4, self.depths), self.depths})
        plans = [(), *(tuple((0,) * level for level in range(1, length + 1)) for length in lengths)]
        if self.ranks > 1:
            prior = Rates(self.depths, self.ranks).acceptance()
            sizes = sorted({min(16, self.most_nodes), min(40, self.most_nodes)})
            plans += [tuple(path for _, path in islice(likeliest(prior, self.depths), size)) for size in sizes]
        return [plan for plan in plans if len(plan) <= self.most_nodes]

    def _costs_of(self, plans: Sequence[tuple[Path, ...]], times: Sequence[PlanTime]) -> Costs:
        return costs_of(plans, times)

    def paths(self, state: "DecodeState") -> tuple[Path, ...]:
        """The nodes of the next draft; none: no draft."""
        if self._forced is not None:
            return self._forced
        chosen = self.outlook(state)
        self._steps += 1
        # A draft that takes longer is tried less often, so that exploring costs at most a share 1 / EXPLORE.
        explores = not chosen.paths and self._steps % round(EXPLORE * self._best.plain_steps) == 0
        shape = self._best if explores else chosen
        step = 1.0, shape.tokens, shape.plain_steps
        self._sums = [before + more for before, more in zip(self._sums, step, strict=True)]
        return shape.paths

    def outlook(self, state: "DecodeState") -> Shape:
        """The shape of the next draft and what is expected of it. It is chosen again every ``DECIDE`` steps."""
        if self._steps >= self._decide_at:
            if self._rates is None:
                prior = self._priors.get("greedy" if state.sampling.greedy else "sampled")
                self._rates = Rates(self.depths, self.ranks, prior)
            costs = self._costs[state.batch, state.sampling, context_limit(state.target, state.length)]
            self._best = best_shape(self._rates.acceptance(), costs, self.most_nodes)
            shape = self._best if self._best.speedup > 1.0 else Shape()
            if shape.paths != self._shape.paths:
                logging.getLogger(__name__).info("drafts: %s, expected speedup %.2f", shape.name, shape.speedup)
            self._shape, self._decide_at = shape, self._steps + min(max(self._steps, 4), DECIDE)
        return self._shape

    def learn(self, plan: TreePlan, size: int, state: "DecodeState", verdict: "Verdict") -> None:
        """Learn from the verdict on a draft of ``size`` nodes of a plan."""
        if self._forced is not None or self._rates is None or not size:
            return
        for row in range(state.batch):
            if state.finished[row]:  # cut short
                continue
            path = verdict.rows[row]
            for depth, tree_row in enumerate(path):  # rows of [root, nodes]
                if candidates := plan.children[tree_row]:
                    right = plan.ranks[path[depth + 1] - 1] if depth + 1 < len(path) else None
                    self._rates.learn(depth, candidates, right)

    def expected(self) -> Expected | None:
        """Expected tokens and time of all steps so far; None before the first."""
        steps, tokens, plain_steps = self._sums
        return Expected(steps, tokens, plain_steps, self._shape.name) if steps else None


def costs_of(plans: Sequence[tuple[Path, ...]], times: Sequence[Sequence[float]]) -> Costs:
    """Fit the costs to the measured ``(draft, rest)`` seconds of the plans."""
    rest = Curve.of({1 + len(plan): seconds for plan, (_, seconds) in zip(plans, times, strict=True)})
    draft = {plan: seconds for plan, (seconds, _) in zip(plans, times, strict=True)}
    chains = [plan for plan in plans if plan and len(plan) == len(plan[-1])]
    first, longest = draft[chains[0]], max(chains, key=len)
    level = max(draft[longest] - first, 0.0) / max(len(longest) - 1, 1)
    extra: list[float] = []
    for plan in plans:
        levels, extended = max(map(len, plan), default=0), len({path[:-1] for path in plan if len(path) > 1})
        if extended >= levels > 1:
            extra.append((draft[plan] - first - (levels - 1) * level) / (extended - levels + 1))
    return Costs(rest, first, level, max(fmean(extra), 0.0) if extra else 0.0)
