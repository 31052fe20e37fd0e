"""A hybrid: a copy where the text repeats itself, a trained head's draft elsewhere (so combines SuffixDecoding, Oliaro
et al. 2024, with EAGLE).

Nothing here knows which two drafters those are. There, a threshold on the copy's score decides; here, what either is
worth: of a copy it is counted how often such a one is right, of the head's drafts, what they promised of late.
"""

from bisect import bisect_left
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf

from .base import Drafter, Promised
from .config import Config
from .decoding.acceptance import Verdict
from .decoding.draft_tree import ROOT, DraftTree
from .decoding.loop import DecodeState
from .decoding.sampling import Sampling
from .drafting.counted import Counted
from .drafting.retrieval import NOTHING, Found, Retrieval, draft_of
from .methods import inner_drafter
from .model.cost import Costs, CostsByLength, step_costs
from .model.target import FeatureOutput, TargetModel

MATCHES = (1, 2, 3, 4, 8, 16, 32)  # kinds of matches: as long, or shorter; the last kind is longer
CLAIMS = (0.3, 0.5, 0.7, 0.9)  # kinds of claims, likewise
# The guess is the claim to the power of so much by the match: 0.29, 0.54, 0.66 where 1, 2, 3 tokens match in one place,
# 0.86 where 8 do. In SmolLM2's own answers it was 0.29, 0.57, 0.60, and 0.94 where 8 or more do.
FORGIVES = 1.8
MEMORY = 0.97  # of the past steps, by which a step's worth is judged, a step later

LOOKUP: dict[str, Any] = {"drafter": "prompt_lookup", "gamma": 16, "max_ngram": 8}


class HybridOptions(Config):
    """``head``: the drafter where nothing is copied and its options, for example ``{drafter: eagle, checkpoint: ...}``,
    or one built for the same target. ``lookup``: what copies, likewise; by default prompt lookup of up to 16 tokens
    after a match of up to 8.

    ``match``: a step is drafted by copying where so many of the text's last tokens were found (of a batch, in half of
    the rows or more); auto: where, and as far as, that is worth more time than the head's draft.
    """

    head: InstanceOf[Drafter] | dict[str, Any]
    lookup: InstanceOf[Drafter] | dict[str, Any] = Field(default_factory=lambda: dict(LOOKUP))
    match: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"


class HybridDrafter(Drafter):
    """Copies or has the head draft, step by step; the head takes in the tokens that were copied when it drafts next.

    Which of the two it is hangs on the text before the step alone, so that either's lossless drafts stay lossless. The
    rows of a batch, which go through the head together, copy together, too.

    Raises:
        ValueError: a ``lookup`` that does not copy; a head that has to draft every step itself, or that for ``match:
            auto`` does not say what its drafts promise.
    """

    name = "hybrid"
    options = HybridOptions
    max_batch = None

    def __init__(self, target: TargetModel, options: HybridOptions) -> None:
        super().__init__(target, options)
        self.head, self.match = inner_drafter(options.head, target), options.match
        self.lookup = _copying(inner_drafter(options.lookup, target))
        _check(self.head, self.match)
        most = [one.max_batch for one in (self.head, self.lookup) if one.max_batch is not None]
        self.max_batch = min(most, default=None)  # type: ignore[misc]
        self.max_draft = max(self.head.max_draft, self.lookup.max_draft)
        self.max_context = min(self.head.max_context, self.lookup.max_context)
        self.taps = self.head.taps
        self.remembers = self.match == "auto" or self.head.remembers or self.lookup.remembers
        self._scales: dict[tuple[int, Sampling], Scales] = {}  # neither costs nor acceptance are the same
        self._costs: dict[int, CostsByLength] = {}  # of batches of so many rows
        self._now: Scales | None = None
        self._found: list[Found] = []
        self._copied = False

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self.head.begin(state, output)
        self.lookup.begin(state, output)
        if self.match == "auto":
            if state.batch not in self._costs:
                self._costs[state.batch] = CostsByLength(partial(self._step_costs, state.batch))
            costs, key = self._costs[state.batch], (state.batch, state.sampling)
            costs.at(state.longest)  # measured now if it is not known yet, and not while decoding
            if key not in self._scales:
                self._scales[key] = Scales(costs.at(0))
            self._now = self._scales[key]

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self.head.join(state, rows, part, output)
        self.lookup.join(state, rows, part, output)

    def promised(self) -> Promised | None:
        head = self.head.promised()
        if head is None or self.match != "auto":
            return None
        steps, tokens, plain = (sum(scales.promised[i] for scales in self._scales.values()) for i in range(3))
        of = steps + head.steps
        choice = f"{steps / of:.0%} of the steps copied, else {head.choice}" if of else head.choice
        return Promised(of, tokens + head.tokens, plain + head.plain_steps, choice)

    def propose(self, state: DecodeState) -> DraftTree:
        found = self._found = self.lookup.retrieve_all(state)
        if self._now is not None:
            self._now.costs = self._costs[state.batch].at(state.length)
        going = state.finished.count(False)
        copies = self._now.best_parts(found, going) if self._now else _matching(found, going, self.match)
        self._copied = any(one.tokens for one in copies)
        if self._copied:
            return draft_of(copies, self.target.device)
        before = self.head.promised()
        draft = self.head.propose(state)
        if self._now is not None and before is not None:
            self._now.note_head(before, self.head.promised() or before)
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if self._now is not None:
            for found, tokens in zip(self._found, verdict.tokens, strict=True):
                self._now.learn(found, tokens)
        if self._copied:
            self.head.follow(state, output, verdict)
        else:
            self.head.observe(state, draft, output, verdict)
        self.lookup.follow(state, output, verdict)

    def _step_costs(self, batch: int, length: int) -> Costs:
        """Copying takes no time worth mentioning, and the head's taking in of a few tokens more not either."""
        return step_costs(self.target, {"method": self.name}, batch, length)


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
    """Weighs a copy against the head's drafts, by costs measured beforehand and what was accepted, never by the clock.

    A token is worth the time that decoding has needed for one of late. Of what can be done in a step, that is best
    whose tokens are worth most beyond the time it takes: nothing else has more tokens per second (Dinkelbach 1967).

    Attributes:
        costs: at the present length.
        promised: steps that were copied, their tokens, and their time in steps without a draft.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.trust = costs, Trust()
        # Steps, their tokens, and their time in plain steps, fading; before anything is known, as of a plain step.
        self._all, self._head = [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]
        self.promised = [0.0, 0.0, 0.0]

    def best_parts(self, found: list[Found], going: int) -> list[Found]:
        """What of it to draft, in each row of a batch: of its likeliest nodes as many as pay most, everywhere the same
        number, as far as a row has them; nothing where the head's draft pays more.

        Args:
            going: rows that have not finished; in the others nothing is found.
        """
        ordered = [self._likeliest(one) for one in found]
        worth = min(self._all[2] / self._all[1], 1.0)
        best, count = (self._head[1] * worth - self._head[2]) / self._head[0], 0
        so_far, steps_then, tokens_then, curve = 1.0, 0.0, 0.0, self.costs.chain
        for place in range(max(map(len, ordered))):
            for one, nodes in zip(found, ordered, strict=True):
                if place < len(nodes):
                    chance, node = nodes[place]
                    so_far += chance / going  # tokens of a row, on average
                    if one.parents[node] != (nodes[place - 1][1] if place else ROOT):
                        curve = self.costs.verify
            steps = curve.at(place + 2) / self.costs.plain
            if so_far * worth - steps > best:
                best, count, tokens_then, steps_then = so_far * worth - steps, place + 1, so_far, steps
        if not count:
            return [NOTHING] * len(found)
        _fade(self._all, tokens_then, steps_then)
        for place, value in enumerate((1.0, tokens_then, steps_then)):
            self.promised[place] += value
        kept = [sorted(node for _, node in nodes[:count]) for nodes in ordered]
        return [_part(one, nodes) for one, nodes in zip(found, kept, strict=True)]

    def _likeliest(self, found: Found) -> list[tuple[float, int]]:
        """Each node with its chance of being accepted, the likeliest first: no child before its parent."""
        chances: list[float] = []
        matches: list[int] = []
        for parent, claim in zip(found.parents, found.claims, strict=True):
            matches.append(found.match if parent == ROOT else matches[parent] + 1)
            above = 1.0 if parent == ROOT else chances[parent]
            chances.append(above * self.trust.of(matches[-1], claim))
        return sorted(((chance, node) for node, chance in enumerate(chances)), key=lambda pair: -pair[0])

    def note_head(self, before: Promised, after: Promised) -> None:
        """The head has drafted a step, and promised for it what its promises differ by."""
        tokens, steps = after.tokens - before.tokens, after.plain_steps - before.plain_steps
        _fade(self._all, tokens, steps)
        _fade(self._head, tokens, steps)

    def learn(self, found: Found, tokens: list[int]) -> None:
        """From what was committed, whoever drafted it, and whatever of what was found was drafted."""
        at, match = ROOT, found.match
        for token in tokens:
            nodes = [node for node, parent in enumerate(found.parents) if parent == at]
            for node in nodes:
                self.trust.learn(match, found.claims[node], found.tokens[node] == token)
            held = [node for node in nodes if found.tokens[node] == token]
            if not held:
                return
            at, match = held[0], match + 1


def _matching(found: list[Found], going: int, match: int | str) -> list[Found]:
    """As ``best_parts``, by the length of the match alone."""
    long = [isinstance(match, int) and bool(one.tokens) and one.match >= match for one in found]
    copied = 2 * sum(long) >= going
    return [one if copied and enough else NOTHING for one, enough in zip(found, long, strict=True)]


def _part(found: Found, kept: list[int]) -> Found:
    """Only the nodes ``kept``, in their order; the parent of each is among them."""
    number = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
    parents = [number[found.parents[node]] for node in kept]
    return Found([found.tokens[n] for n in kept], parents, [found.claims[n] for n in kept], found.match)


def _fade(sums: list[float], tokens: float, steps: float) -> None:
    """Add a step."""
    sums[:] = [MEMORY * before + new for before, new in zip(sums, (1.0, tokens, steps), strict=True)]


def _copying(lookup: Drafter) -> Retrieval:
    if not isinstance(lookup, Retrieval):
        raise ValueError(f"lookup is {lookup.name!r}, which does not copy; use prompt_lookup, suffix or rest")
    return lookup


def _check(head: Drafter, match: int | str) -> None:
    if not head.follows:
        raise ValueError(
            f"the head is {head.name!r}, which has to draft every step itself; use one that can follow another's, for "
            "example eagle or speculative"
        )
    if match == "auto" and head.promised() is None:
        raise ValueError(
            f"match: auto weighs a copy against what the head promises, and {head.name!r} promises nothing as it is: "
            "let it choose its drafts, too (eagle: tree: auto; speculative: gamma: auto), or give match a number"
        )
