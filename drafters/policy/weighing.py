"""What a copy is worth: how often such a one is right, counted, against what its rows cost."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count, pairwise

import torch

from drafters.base import Promised
from drafters.drafting.one_tree import Held, leaves_draft
from drafters.drafting.retrieval import NOTHING, Found, Retrieval, part_of
from drafters.loop.acceptance import Verdict
from drafters.loop.generate import DecodeState
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT
from drafters.loop.waiting import Hindsight
from drafters.model.cache import KVCache
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.costs import CostsByLength, Make, step_costs
from drafters.policy.counted import Counted
from drafters.policy.growth import COMMON
from drafters.policy.kept_costs import Costs
from drafters.policy.looking import FRUITLESS, Looking
from drafters.policy.shape import RARE, reckoned

MATCHES = (1, 2, 3, 4, 8, 16, 32)  # kinds of matches: as long, or shorter; the last kind is longer
# Kinds of claims, likewise. Where a row costs a fiftieth of a step, a node pays that is right once in fifty times.
CLAIMS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
# The guess is the claim to the power of so much by the match: 0.29, 0.54, 0.66 where 1, 2, 3 tokens match in one place,
# 0.86 where 8 do. In SmolLM2's own answers it was 0.29, 0.57, 0.60, and 0.94 where 8 or more do.
FORGIVES = 1.8
COPIED, COPY = 256, 16  # nodes of a copy: the most, and those of one that is timed
SAYS, TIMES = 8, 4  # tokens that the text that is timed says so many times before it goes on to others
PATH = list(range(ROOT, COPIED))  # the parents of a chain's nodes
DOUBT = 8.0  # copied tokens that were accepted as their chances said, before anything is known
MOST = 1.3  # times as many tokens as their chances say
FORGIVEN = 0.99  # of the distrust that is left, a step later, where nothing was copied
MEMORY = 0.97  # of the past steps, by which a step's worth is judged, a step later
ROW = 0.01  # of a step: what a row costs where it costs little; before that is known
# Times its row's price a share of the places has to be. Of SmolLM2's answers, at four machines' costs, nothing was lost
# up to that: small shares promise more than comes of them, and a step has more tokens than one.
SCARCE = 3.0


class Trust:
    """How often a copied token is the target's, by how long a match it goes on from and by what it claims.

    A draft's second token goes on from a match that is longer by one, and so forth.
    """

    def __init__(self) -> None:
        self._counted = Counted((len(MATCHES) + 1) * (len(CLAIMS) + 1))

    def of(self, match: int, claim: float) -> float:
        """P(it is | the tokens before it were)."""
        return self._counted.share(_kind(match, claim), claim ** (FORGIVES / match))

    def learn(self, match: int, claim: float, right: bool) -> None:
        """Whether it was."""
        self._counted.learn(_kind(match, claim), right)


def _kind(match: int, claim: float) -> int:
    return bisect_left(MATCHES, match) * (len(CLAIMS) + 1) + bisect_left(CLAIMS, claim)


class Scales:
    """Weighs a copy against a head's drafts, or against none, by costs measured beforehand and what was accepted, never
    by the clock.

    A token is worth the time that decoding has needed for one of late. Of what can be done in a step, that is best
    whose tokens are worth most beyond the time it takes: nothing else has more tokens per second (Dinkelbach 1967).

    Attributes:
        costs: at the present length.
        trust: in what is copied. apart: in a copied token that the head has not drafted where it could have.
        looking: when to look for copies.
        hindsight: how much of what copies promise a batch comes to its last row.
        least: what follows at a smaller share of the places is not worth a row, wherever it stands.
        promised: steps that were copied, their tokens, and their time in steps without a draft.
    """

    def __init__(self, costs: Costs) -> None:
        self.reckon(costs)
        self.trust, self.apart = Trust(), Trust()
        self.looking, self.hindsight = Looking(), Hindsight()
        # Steps, their tokens, and their time in plain steps, fading; before anything is known, as of a plain step.
        self._all, self._head = [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]
        self.promised = [0.0, 0.0, 0.0]
        # Copied tokens by their chances, and those accepted, fading. What is chosen for its chances has them overrated
        # more often than underrated, and text that starts or stops repeating itself is seen too late.
        self._claimed, self._accepted, self._claim = DOUBT, DOUBT, 0.0

    def reckon(self, costs: Costs) -> None:
        """Go by these costs from now on."""
        self.costs, self._curves = costs, reckoned(costs, COPIED)
        rows = [after - before for curve in self._curves[:2] for before, after in pairwise(curve)]
        least = map(min, rows[:COPIED], rows[COPIED:])
        # What every further node costs at least, by the nodes that there are.
        self._least = [*list(accumulate(reversed(list(least)), min))[::-1], math.inf]
        # A first node may cost nothing, on some machines; what follows at so small a share would be one of several.
        self.least = max(SCARCE * self._least[1] / costs.plain, RARE)

    def best_parts(
        self, found: list[Found], going: int, weights: Sequence[float] | None = None, share: float = 1.0
    ) -> list[Found]:
        """What of it to draft, in each row of a batch: of its likeliest nodes as many as pay most, everywhere the same
        number, as far as a row has them; nothing where the head's draft pays more, or no draft.

        Args:
            going: rows that have not finished; in the others nothing is found.
            weights: of each row's tokens (``DecodeState.weights``); by default 1.
            share: of these tokens that counts (``Hindsight``).
        """
        ordered = [self._likeliest(one) for one in found]
        weights = weights or [1.0] * len(found)
        paths = all(one.parents == PATH[: len(one.parents)] for one in found)
        worth = min(self._all[2] / self._all[1], 1.0)
        best = without = (self._head[1] * worth - self._head[2]) / self._head[0]
        count = 0
        so_far, steps_then, tokens_then, claimed = 1.0, 0.0, 0.0, 0.0
        curve = path = self._curves.chain
        honest, self._claim = min(self._accepted / self._claimed, MOST) * share, 0.0
        for place in range(min(max(map(len, ordered)), COPIED)):
            before = so_far
            for one, nodes, weight in zip(found, ordered, weights, strict=True):
                if place < len(nodes):
                    chance, node = nodes[place]
                    claimed += chance
                    so_far += honest * weight * chance / going  # tokens of a row, on average
                    if one.parents[node] != (nodes[place - 1][1] if place else ROOT):
                        curve = self._curves.verify
            steps = (curve[place + 1] + (so_far - 1.0) * self.costs.accepted) / self.costs.plain
            if so_far * worth - steps > best:
                best, count, tokens_then, steps_then = so_far * worth - steps, place + 1, so_far, steps
                self._claim = claimed
            elif (so_far - before) * worth * self.costs.plain < self._least[place + 1] and (paths or curve is not path):
                break  # what comes later is less likely
        judged = self.costs.first * (1.0 if count else FRUITLESS)
        took = (judged + going * self.costs.draft.at(1)) / self.costs.plain
        self.promised[2] += took
        self.looking.judge(took, best - without)
        if not count:
            return [NOTHING] * len(found)
        self.hindsight.promise(tokens_then, share)
        _fade(self._all, tokens_then, steps_then)
        for place, value in enumerate((1.0, tokens_then, steps_then)):
            self.promised[place] += value
        kept = [sorted(node for _, node in nodes[:count]) for nodes in ordered]
        return [part_of(one, nodes) for one, nodes in zip(found, kept, strict=True)]

    def beside(
        self,
        found: list[Found],
        held: list[Held],
        size: int,
        going: int,
        weights: Sequence[float] | None = None,
        share: float = 1.0,
    ) -> list[list[int]]:
        """Which nodes of each row's copy to verify behind a head's draft of ``size`` nodes, where ``held`` ones are
        already: as many as pay for their rows."""
        pairs = zip(found, held, strict=True)
        ordered = [[pair for pair in self._likeliest(one, has) if pair[1] not in has] for one, has in pairs]
        worth, verify = min(self._all[2] / self._all[1], 1.0), self.costs.verify
        weights = weights or [1.0] * len(found)
        count, tokens, steps = 0, 0.0, 0.0
        for place in range(max(map(len, ordered))):
            more = share * sum(
                weight * nodes[place][0] / going
                for nodes, weight in zip(ordered, weights, strict=True)
                if place < len(nodes)
            )
            row = verify.at(size + place + 2) - verify.at(size + place + 1)
            cost = (row + more * self.costs.accepted) / self.costs.plain
            if more * worth <= cost:
                break
            count, tokens, steps = place + 1, tokens + more, steps + cost
        self.looking.gained_more(tokens * worth - steps)
        for sums in (self._all, self._head, self.promised):
            sums[1], sums[2] = sums[1] + tokens, sums[2] + steps
        return [[node for _, node in nodes[:count]] for nodes in ordered]

    def _likeliest(self, found: Found, held: Held | None = None) -> list[tuple[float, int]]:
        """Each node with its chance of being accepted, the likeliest first: no child before its parent."""
        chances: list[float] = []
        matches: list[int] = []
        for node, (parent, claim) in enumerate(zip(found.parents, found.claims, strict=True)):
            matches.append(found.match if parent == ROOT else matches[parent] + 1)
            above = 1.0 if parent == ROOT else chances[parent]
            trust = self.apart if held is not None and leaves_draft(found, held, node) else self.trust
            chances.append(above * trust.of(matches[-1], claim))
        return sorted(((chance, node) for node, chance in enumerate(chances)), key=lambda pair: -pair[0])

    def note_plain(self, steps: int = 1) -> None:
        """Nothing was drafted in so many steps."""
        _fade(self._all, 1.0, 1.0, steps)

    def note_head(self, before: Promised, after: Promised, times: int = 1) -> None:
        """The head has drafted a step, or so many alike, and promised for it what its promises differ by."""
        tokens, steps = after.tokens - before.tokens, after.plain_steps - before.plain_steps
        _fade(self._all, tokens, steps, times)
        _fade(self._head, tokens, steps, times)

    def settle(self, accepted: int, steps: int = 1) -> None:
        """So many of the copied tokens were accepted, in all rows; if none had been drafted, in so many steps, distrust
        fades."""
        fading, claim, held = (MEMORY, self._claim, float(accepted)) if self._claim else (FORGIVEN**steps, DOUBT, DOUBT)
        weight = 1.0 if self._claim else 1 - fading
        self._claimed = fading * self._claimed + weight * claim
        self._accepted = fading * self._accepted + weight * held
        self._claim = 0.0

    def learn(self, found: Found, tokens: list[int], held: Held | None = None) -> None:
        """From what was committed, whoever drafted it, and whatever of what was found was drafted.

        ``held``: of a step that the head drafted, what of it its draft held.
        """
        at, match = ROOT, found.match
        for token in tokens:
            nodes = [node for node, parent in enumerate(found.parents) if parent == at]
            for node in nodes:
                right = found.tokens[node] == token
                self.trust.learn(match, found.claims[node], right)
                if held is not None and leaves_draft(found, held, node):
                    self.apart.learn(match, found.claims[node], right)
            right_ones = [node for node in nodes if found.tokens[node] == token]
            if not right_ones:
                return
            at, match = right_ones[0], match + 1


class Weighing:
    """Scales for each batch size and way of sampling: neither costs nor acceptance are the same.

    A head's taking in of a few tokens more takes no time worth mentioning.

    Args:
        lookup: what finds the copies. Where that takes its time (``Retrieval.look``), it is timed as a draft pass is.

    Attributes:
        ask: for the costs of a batch size, a way of sampling and a length.
    """

    def __init__(self, target: TargetModel, lookup: Retrieval) -> None:
        def ask(batch: int, sampling: Sampling, context: int) -> Costs:
            drafting = partial(asked, target, lookup, batch, sampling)
            return step_costs(
                target, {"method": "copy"} | lookup.kind(), batch, sampling, context, drafting, seldom=True
            )

        self.ask: Callable[[int, Sampling, int], Costs] = ask
        self._scales: dict[tuple[int, Sampling], Scales] = {}
        self._costs: dict[tuple[int, Sampling], CostsByLength] = {}
        self._now: Scales
        self._plain = 0
        self._passed = 0  # steps since the last that asked

    def begin(self, state: DecodeState) -> None:
        """Go by what is known of so many rows, sampled so."""
        short = self.prepare(state.batch, state.sampling, state.longest)  # now, and not while decoding
        self._settle_passed()
        self._now = self._scales.setdefault((state.batch, state.sampling), Scales(short))
        self._now.hindsight.settle()
        self._now.looking.begin()

    def join(self) -> None:
        """Other texts have come into the batch."""
        self._now.looking.begin()

    def prepare(self, batch: int, sampling: Sampling, longest: int) -> Costs:
        """Measure what is not known yet of so many rows, of up to so many tokens; what short texts cost."""
        key = batch, sampling
        if key not in self._costs:
            self._costs[key] = CostsByLength(partial(self.ask, *key))
        short, _ = (self._costs[key].at(length) for length in (0, longest))
        return short

    def best_parts(self, found: list[Found], state: DecodeState) -> list[Found]:
        """As ``Scales.best_parts``."""
        if not self._now.looking.now:
            return found
        costs = self._costs[state.batch, state.sampling].at(state.length)
        if costs is not self._now.costs:
            self._now.reckon(costs)
        return self._now.best_parts(found, state.finished.count(False), state.weights(), self._share(state))

    def found(self, lookup: Retrieval, state: DecodeState) -> list[Found]:
        """What each row could go on with; nothing in a step that does not look."""
        self._settle_passed()
        return lookup.retrieve_all(state) if self._now.looking.step() else [NOTHING] * state.batch

    def _settle_passed(self) -> None:
        if self._passed:
            self._now.settle(0, self._passed)
            self._passed = 0

    @property
    def least(self) -> float:
        """As ``Scales.least``."""
        return self._now.least if self._scales else SCARCE * ROW

    def may_rest(self) -> int:
        """How many of the next steps will not look for a copy."""
        return self._now.looking.rests

    def rest(self, steps: int) -> None:
        """So many steps did not ask."""
        self._now.looking.rest(steps)

    def pass_by(self) -> None:
        """A step that did not ask was committed."""
        self._passed += 1

    def note_head(self, before: Promised, after: Promised, times: int = 1) -> None:
        """As ``Scales.note_head``."""
        self._now.note_head(before, after, times)

    def note_plain(self, steps: int = 1) -> None:
        """As ``Scales.note_plain``."""
        self._plain += steps
        self._now.note_plain(steps)

    def beside(self, found: list[Found], held: list[Held], size: int, state: DecodeState) -> list[list[int]]:
        """As ``Scales.beside``."""
        return self._now.beside(found, held, size, state.finished.count(False), state.weights(), self._share(state))

    def _share(self, state: DecodeState) -> float:
        return self._now.hindsight.share if state.waits else 1.0

    def learn(self, state: DecodeState, found: list[Found], verdict: Verdict, held: list[Held] | None = None) -> None:
        """What was committed in each batch row, where that had been found; ``held``: as ``Scales.learn`` has it."""
        self._now.hindsight.look_back(state, verdict)
        self._settle_passed()
        self._now.settle(sum(len(rows) - 1 for rows in verdict.rows if rows))
        for row, (one, tokens) in enumerate(zip(found, verdict.tokens, strict=True)):
            self._now.learn(one, tokens, held[row] if held else None)

    def promised(self, head: Promised | None = None) -> Promised:
        """For all steps so far, those that a ``head`` drafted included."""
        other = head or Promised(self._plain, self._plain, self._plain, "no draft")
        steps, tokens, plain = (sum(scales.promised[i] for scales in self._scales.values()) for i in range(3))
        of = steps + other.steps
        choice = f"{steps / of:.0%} of the steps copied, else {other.choice}" if of else other.choice
        return Promised(of, tokens + other.tokens, plain + other.plain_steps, choice)


def asked(
    target: TargetModel, lookup: Retrieval, batch: int, sampling: Sampling, context: int
) -> tuple[Make, Make | None]:
    """Drafts behind a text that goes on most of the time as it went on before, and learns what became of it, as a step
    does; and looks for copies, where that takes its time: to be timed."""
    one, look = lookup.unread(), lookup.look()
    weighing = one.weighing = Weighing(target, one)
    weighing.ask = lambda *given: COMMON
    if look is not None:
        found = Found(list(range(COPY)), list(range(ROOT, COPY - 1)), [0.5] * COPY, 2)
        one.retrieve = lambda state, row=0: found  # type: ignore[method-assign]
    said = (
        token % target.vocab_size for new in count(step=SAYS) for _ in range(TIMES) for token in range(new, new + SAYS)
    )
    texts = [[next(said) for _ in range(2 * SAYS)] for _ in range(batch)]
    generator = torch.Generator(target.device)
    unending, going = target.max_context << 20, [False] * batch  # tokens
    state = DecodeState(
        target, KVCache.nothing(), texts, [1] * batch, sampling, generator, unending, frozenset(), going
    )
    one.begin(state, FeatureOutput(torch.empty(0)))

    def ask() -> None:
        weighing._now.looking.begin()
        draft = one.propose(state)
        token = next(said)
        for row in range(batch):
            state.append(row, [token])
        one.observe(state, draft, FeatureOutput(torch.empty(0)), Verdict([[0]] * batch, [[token]] * batch, [0] * batch))

    return lambda late: ask, None if look is None else lambda rows: look


def _fade(sums: list[float], tokens: float, steps: float, times: int = 1) -> None:
    """Add a step, or so many alike."""
    left = MEMORY**times
    weight = (1 - left) / (1 - MEMORY)
    sums[:] = [left * before + weight * new for before, new in zip(sums, (1.0, tokens, steps), strict=True)]
