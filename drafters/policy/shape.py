"""Drafts that fit the machine: the shape of most tokens per second, from what rows cost and what is accepted.

Sequoia (Chen et al. 2024) chooses a static tree by the same two figures. Its assumption is ours: whether the drafter's
r-th candidate at depth d is the target's token depends on r and d alone. Then a node is accepted with the product of
the probabilities along its path, a tree gives the sum over its nodes, and the best tree of n nodes is that of the n
likeliest paths: what Sequoia finds by dynamic programming is there to be counted off.
"""

import heapq
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from drafters.base import Promised
from drafters.drafting.tree_plan import TreePlan
from drafters.loop.sampling import Sampling
from drafters.loop.waiting import Hindsight, trials
from drafters.policy.costs import CostsByLength
from drafters.policy.kept_costs import Costs

if TYPE_CHECKING:
    from drafters.loop.acceptance import Verdict
    from drafters.loop.generate import DecodeState

Path = tuple[int, ...]  # a node: the ranks of its ancestors and itself among their siblings
Table = list[list[float]]  # [depth][rank]
Way = Literal["greedy", "sampled"]  # of choosing tokens: acceptance is not the same
Probability = Annotated[float, Field(ge=0.0, le=1.0)]

# Before anything is known: of the drafter's first candidate, of its second where the first was wrong, and so on.
PRIOR = (0.6, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06)
FADING = 0.95  # a depth nothing is known of accepts so much of what the one before does
DOUBT = 8.0  # trials that the prior counts for
WINDOW = 200.0  # trials that are remembered: the next prompt may be another kind of text
WORTH = 1.02  # times plain decoding's speed that a draft has to promise
SWITCH = 1.01  # times its own speed that another shape has to promise
SELDOM, SELDOM_IDLE = 64, 256  # steps from one decision to the next, at most: where drafts pay, where none does
# Of the time that may go into drafts that do not pay, to learn whether they do by now, as costs reckon it. A head that
# seldom drafts takes twice as long as they say: it is in no cache, and slows the next steps.
PROBES = 0.005
RARE = 0.005  # nodes less likely than that are not considered
CAME = 0.85  # of what drafts promise a batch, to its last row, before anything is known


class Rates:
    """How often a draft's candidates are accepted, by depth and rank, from counts that fade.

    Attributes:
        depths, ranks: how deep and wide the counts go.
    """

    def __init__(self, depths: int, ranks: int, table: Table | None = None) -> None:
        self.depths, self.ranks = depths, ranks
        self._prior = _fitting(table, depths, ranks) if table else None
        self._tried = [[0.0] * ranks for _ in range(depths)]
        self._right = [[0.0] * ranks for _ in range(depths)]

    def learn(self, depth: int, candidates: int, accepted: int | None, weight: float = 1.0) -> None:
        """Of the first ``candidates`` at ``depth`` after an accepted path, the one of rank ``accepted`` was right."""
        tried, right = self._tried[depth], self._right[depth]
        last = min(candidates if accepted is None else accepted + 1, self.ranks)
        for rank in range(last):
            if tried[rank] >= WINDOW:
                left = 1 - weight / WINDOW
                tried[rank], right[rank] = tried[rank] * left, right[rank] * left
            tried[rank] += weight
        if accepted is not None and accepted < self.ranks:
            right[accepted] += weight

    def hazards(self) -> Table:
        """P(the candidate of rank r is right | those before it are wrong), by depth.

        Where nothing is known of a depth, it is as the one before, and a little less.
        """
        found: Table = []
        for depth in range(self.depths):
            if self._prior is not None:
                prior: Sequence[float] = self._prior[depth]
            else:
                prior = [FADING * value for value in found[-1]] if found else PRIOR
            prior = list(prior) + [PRIOR[-1]] * (self.ranks - len(prior))
            counts = zip(self._right[depth], self._tried[depth], prior, strict=False)
            found.append([(right + DOUBT * before) / (tried + DOUBT) for right, tried, before in counts])
        return found

    def table(self, share: float = 1.0) -> Table:
        """P(the target's token is the candidate of rank r | the path up to it is accepted), by depth; falling in r.

        ``share``: of what is accepted that counts.
        """
        first, *others = (accepted(row) for row in self.hazards())
        return [[share * value for value in first], *others]


def accepted(hazards: Sequence[float]) -> list[float]:
    """Of each rank, from the probabilities where those before it are wrong; never rising."""
    found: list[float] = []
    left = 1.0
    for hazard in hazards:
        found.append(min(left * hazard, found[-1] if found else 1.0))
        left *= 1.0 - hazard
    return found


def _fitting(table: Table, depths: int, ranks: int) -> Table:
    """Hazards for as many depths and ranks as are wanted."""
    rows = [row[:ranks] for row in table[:depths]]
    while len(rows) < depths:
        rows.append([FADING * value for value in rows[-1]])
    return rows


class Shape(NamedTuple):
    """A static tree (of one child a node: a chain; of no node: plain decoding), and what it promises.

    Attributes:
        tokens: a step and batch row, bonus included. seconds: of the step.
        speedup: over plain decoding.
    """

    paths: tuple[Path, ...]
    tokens: float
    seconds: float
    speedup: float

    @property
    def name(self) -> str:
        """In words."""
        size, depth = len(self.paths), max(map(len, self.paths), default=0)
        return "no draft" if not size else f"a chain of {size}" if size == depth else f"a tree of {size}, {depth} deep"

    def __str__(self) -> str:
        return f"{self.name}, {self.tokens:.2f} tokens a step, {self.speedup:.2f} times plain decoding's speed"


def likeliest(table: Table, depth: int) -> Iterator[tuple[float, Path]]:
    """The nodes of the infinite tree of at most ``depth`` levels, the likeliest first, with their probabilities.

    None precedes its parent or an elder sibling, whose probabilities are no smaller.
    """
    heap: list[tuple[float, int, Path, float]] = [(-table[0][0], 1, (0,), 1.0)]
    while heap:
        negative, level, path, before = heapq.heappop(heap)
        yield -negative, path
        if level < depth:
            heapq.heappush(heap, (negative * table[level][0], level + 1, (*path, 0), -negative))
        if (rank := path[-1] + 1) < len(table[level - 1]):
            heapq.heappush(heap, (-before * table[level - 1][rank], level, (*path[:-1], rank), before))


class Reckoned(NamedTuple):
    """Costs read off once, for decisions come every few steps.

    Attributes:
        verify, chain: seconds by nodes. draft: what one more row adds to a draft pass, by the rows that it has.
        row: what a node adds at least to ``verify`` and ``chain``.
    """

    verify: list[float]
    chain: list[float]
    draft: list[float]
    row: float


@lru_cache(64)
def reckoned(costs: Costs, most_nodes: int) -> Reckoned:
    """Of drafts of up to so many nodes."""
    verify, chain = ([curve.at(1 + n) for n in range(most_nodes + 1)] for curve in (costs.verify, costs.chain))
    draft = [0.0, *(costs.draft.at(rows) for rows in range(1, most_nodes + 2))]
    row = min(after - before for curve in (verify, chain) for before, after in pairwise(curve))
    return Reckoned(verify, chain, [after - before for before, after in pairwise(draft)], row)


def best_shape(table: Table, costs: Costs, most_nodes: int, least_nodes: int = 0) -> Shape:
    """The static tree of most tokens per second, of ``least_nodes`` to ``most_nodes`` nodes."""
    plain = costs.plain
    # A node adds its probability, and at least so many seconds: once that is less a second, no likelier tree is better.
    verify, chain, draft, row = reckoned(costs, most_nodes)
    best = Shape((), 1.0, plain, 1.0)
    if least_nodes:
        best = best._replace(speedup=0.0)
    chains = [[row[:1] for row in table]] if len(table[0]) > 1 else []  # what the likeliest trees may leave out
    for some, depth in [(table, depth) for depth in range(1, len(table) + 1)] + [(rows, len(rows)) for rows in chains]:
        tree = _Growing(costs.first, draft)
        for probability, path in likeliest(some, depth):
            enough = len(tree.paths) >= max(least_nodes, 1)
            hopeless = probability * plain < best.speedup * row
            if len(tree.paths) == most_nodes or (enough and (hopeless or probability < RARE)):
                break
            tree.add(probability, path)
            seconds = tree.draft_seconds + (chain if len(tree.paths) == len(path) else verify)[len(tree.paths)]
            seconds += (tree.tokens - 1.0) * costs.accepted
            speedup = tree.tokens / seconds * plain
            if len(tree.paths) >= least_nodes and speedup > best.speedup:
                best = Shape(tuple(tree.paths), tree.tokens, seconds, speedup)
    return best


class _Growing:
    """A tree to which one node after the other is added: what it gives and what drafting it takes."""

    def __init__(self, first: float, draft: list[float]) -> None:
        self._draft = draft
        self.draft_seconds = first
        self.paths: list[Path] = []
        self.tokens = 1.0
        self._inner: set[Path] = {()}
        self._levels: dict[int, int] = {}

    def add(self, probability: float, path: Path) -> None:
        """Add a node whose parent is there."""
        self.paths.append(path)
        self.tokens += probability
        if (parent := path[:-1]) not in self._inner:  # it has to be forwarded now
            self._inner.add(parent)
            rows = self._levels.get(len(parent), 0)
            self._levels[len(parent)] = rows + 1
            self.draft_seconds += self._draft[rows]


def promise(paths: Sequence[Path], table: Table, costs: Costs) -> Shape:
    """What a tree promises, the table and the costs being as they are."""
    plain = costs.plain
    if not paths:
        return Shape((), 1.0, plain, 1.0)
    curves = reckoned(costs, len(paths))
    tree = _Growing(costs.first, curves.draft)
    for path in paths:
        tree.add(math.prod(table[depth][rank] for depth, rank in enumerate(path)), path)
    seconds = (curves.chain if len(paths) == len(paths[-1]) else curves.verify)[len(paths)] + tree.draft_seconds
    seconds += (tree.tokens - 1.0) * costs.accepted
    return Shape(tuple(paths), tree.tokens, seconds, tree.tokens / seconds * plain)


def probe_after(loss: float) -> int:
    """Steps until the next probe, where one costs ``loss`` steps: at most ``PROBES`` of the time go into them."""
    return min(max(math.ceil(loss / PROBES), 8), 256)


@dataclass
class _Course:
    """What is known and chosen for one way of sampling at one batch size."""

    rates: Rates
    costs: Costs  # at the present length
    shape: Shape
    probe: Shape | None = None  # what is drafted to learn, while nothing pays
    steps: int = 0
    decide_at: int = 4
    probe_at: int = 0
    probed: bool = False  # by the last step
    drafted_at: int = 0  # the last step that drafted
    hindsight: Hindsight = field(default_factory=lambda: Hindsight(CAME))
    waits: bool = False  # for the last row of a batch, as of the last step
    promised: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # steps, their tokens, their plain seconds

    @property
    def share(self) -> float:
        """Of what is accepted, that comes to the row that is waited for."""
        return self.hindsight.share if self.waits else 1.0

    def table(self) -> Table:
        """``Rates.table`` as it counts here."""
        return self.rates.table(self.share)


class Chooser:
    """Chooses the shape of the next draft, and learns from what became of the last.

    It goes by costs measured beforehand and by acceptance alone, never by the clock: the same prompts and seeds give
    the same drafts.

    Args:
        costs: of a batch size, a way of sampling and a length; asked once for each.
        tables: acceptance to start from (``Rates.hazards``), by "greedy" and "sampled".
    """

    def __init__(
        self,
        costs: Callable[[int, Sampling, int], Costs],
        most_nodes: int,
        depths: int,
        ranks: int,
        tables: dict[Way, Table] | None = None,
    ) -> None:
        self._ask, self._most, self._size, self._tables = costs, most_nodes, (depths, ranks), tables or {}
        self._costs: dict[tuple[int, Sampling], CostsByLength] = {}
        self._rates: dict[Sampling, Rates] = {}
        self._courses: dict[tuple[int, Sampling], _Course] = {}
        self._now: _Course | None = None

    def begin(self, batch: int, sampling: Sampling, longest: int) -> None:
        """Before a batch: measure what is not known yet of so many rows, of up to so many tokens."""
        for course in self._courses.values():
            course.hindsight.settle()
            course.drafted_at = course.steps  # the prompt is taken in with the prefill
        for length in (0, longest):
            self.costs(batch, sampling, length)

    def costs(self, batch: int, sampling: Sampling, length: int) -> Costs:
        """At this length."""
        key = batch, sampling
        if key not in self._costs:
            self._costs[key] = CostsByLength(partial(self._ask, *key))
        return self._costs[key].at(length)

    def shape(self, batch: int, sampling: Sampling, length: int, most: int | None = None) -> Shape:
        """Of the next draft, behind ``length`` tokens; where no more than ``most`` tokens can be drafted now, so many
        of its first."""
        course = self._next(batch, sampling, length)
        chosen = course.shape
        if course.probe is not None and course.steps >= course.probe_at:
            late = course.costs.late * (course.steps - course.drafted_at)
            chosen = course.probe._replace(seconds=course.probe.seconds + late)
            loss = (chosen.seconds - chosen.tokens * course.shape.seconds) / course.shape.seconds
            course.probe_at = course.steps + probe_after(loss)
            course.probed = True
        if most is not None and most < len(chosen.paths):
            chosen = promise(chosen.paths[:most], course.table(), course.costs)
        if chosen.paths:
            course.drafted_at = course.steps
        plain = course.costs.plain
        for place, value in enumerate((1.0, chosen.tokens, chosen.seconds / plain)):
            course.promised[place] += value
        course.hindsight.promise(chosen.tokens, course.share)
        return chosen

    def outlook(self, batch: int, sampling: Sampling, length: int) -> Shape:
        """What the next draft would be; nothing is counted, for something else may draft it."""
        return self._next(batch, sampling, length).shape

    def may_rest(self) -> int:
        """How many of the next steps will draft nothing: until a probe, or until it is decided anew."""
        course = self._now
        if course is None or course.shape.paths or course.probed:
            return 0
        probe_at = math.inf if course.probe is None else course.probe_at - course.steps - 1
        return int(max(min(course.decide_at - course.steps, probe_at), 0))

    def rest(self, steps: int) -> None:
        """So many steps were not asked for."""
        assert self._now is not None and not self._now.shape.paths
        self._now.steps += steps
        for place in range(3):
            self._now.promised[place] += steps

    def learn(self, depth: int, candidates: int, right: int | None, weight: float = 1.0) -> None:
        """As ``Rates.learn``, of the draft that was shaped last."""
        if self._now is not None and depth < self._now.rates.depths:
            self._now.rates.learn(depth, candidates, right, weight)

    def look_back(self, state: "DecodeState", verdict: "Verdict") -> None:
        """What was shaped last was committed: of a batch, it is judged when that has ended (``Hindsight``)."""
        if self._now is not None:
            self._now.waits = state.waits
            self._now.hindsight.look_back(state, verdict)

    def learn_step(self, plan: TreePlan, size: int, state: "DecodeState", verdict: "Verdict") -> None:
        """Learn from a step's draft, of ``size`` nodes of a plan."""
        self.look_back(state, verdict)
        for row, weight in enumerate(trials(state.weights())) if size else ():
            if not state.finished[row]:  # else cut short
                self.learn_path(plan, verdict.own_rows(row, size), weight)

    def learn_path(self, plan: TreePlan, rows: list[int], weight: float = 1.0) -> None:
        """Learn from a batch row's accepted ``rows`` of [root, nodes] (``Verdict.rows``), the draft being of a plan.

        ``weight``: of the row's tokens (``waiting.trials``).
        """
        for depth, row in enumerate(rows):
            if candidates := plan.children[row]:
                right = plan.ranks[rows[depth + 1] - 1] if depth + 1 < len(rows) else None
                self.learn(depth, candidates, right, weight)

    def chain(self, batch: int, sampling: Sampling, length: int, most: int) -> int:
        """Tokens of the next draft, where drafts are chains: at most ``most``, which is all that there are."""
        return len(self.shape(batch, sampling, length, most).paths)

    def learn_chain(self, drafted: int, right: int, weight: float = 1.0) -> None:
        """Learn from a chain of which the first ``right`` tokens were accepted; ``weight`` as for ``learn_path``."""
        for depth in range(min(drafted, right + 1)):
            self.learn(depth, 1, 0 if depth < right else None, weight)

    def promised(self) -> Promised:
        """For all steps so far."""
        steps, tokens, plain = (sum(course.promised[i] for course in self._courses.values()) for i in range(3))
        return Promised(steps, tokens, plain, self._now.shape.name if self._now is not None else "nothing yet")

    def _next(self, batch: int, sampling: Sampling, length: int) -> _Course:
        """The course that the next step is on, decided anew every now and then."""
        course = self._now = self._course(batch, sampling, length)
        if course.steps >= course.decide_at or self._may_pay(course):
            self._decide(course)
            # Where nothing is drafted, probes alone teach, and what they do is looked at after each.
            course.decide_at = course.steps + min(max(course.steps, 4), SELDOM if course.shape.paths else SELDOM_IDLE)
        course.steps += 1
        return course

    def _may_pay(self, course: _Course) -> bool:
        """Whether the last step's probe has taught that it pays by now. Deciding takes about as long as a step of a
        small target, and while nothing pays, most probes teach that still nothing does."""
        probed, course.probed = course.probed, False
        if not probed or course.probe is None:
            return False
        return promise(course.probe.paths, course.table(), course.costs).speedup >= WORTH

    def _course(self, batch: int, sampling: Sampling, length: int) -> _Course:
        course, costs = self._courses.get((batch, sampling)), self.costs(batch, sampling, length)
        if course is None:
            table = self._tables.get("greedy" if sampling.greedy else "sampled")
            rates = self._rates.setdefault(sampling, Rates(*self._size, table))
            course = self._courses[batch, sampling] = _Course(rates, costs, Shape((), 1.0, costs.plain, 1.0))
            self._decide(course)
        elif costs is not course.costs:  # it has grown, or another prompt has come
            course.costs = costs
            self._decide(course)
        return course

    def _decide(self, course: _Course) -> None:
        table, costs = course.table(), course.costs
        before = promise(course.shape.paths, table, costs)
        found = best = best_shape(table, costs, self._most, least_nodes=1)
        if best.speedup < WORTH:
            best = promise((), table, costs)
        if before.paths and before.speedup >= WORTH and best.speedup < SWITCH * before.speedup:
            best = before
        course.probe = None
        if not best.paths:
            course.probe = found
            course.probe_at = course.probe_at or course.steps + 8
        if best.paths != course.shape.paths or not course.steps:
            logging.getLogger(__name__).info("drafts: %s", best)
        course.shape = best
