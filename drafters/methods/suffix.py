"""Suffix decoding (Oliaro et al. 2024, SuffixDecoding): what followed the text's end earlier on and in past answers, as
a tree of the likeliest tokens by how often they did; the longer the match, the larger the tree. Untrained.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from drafters.config import Amount, Config, DraftSize
from drafters.drafting.retrieval import BETWEEN, NOTHING, Copy, Next, Retrieval, likeliest_tree
from drafters.drafting.suffix_automaton import SuffixAutomaton
from drafters.loop.state import DecodeState
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.copies import CopyPolicy

MOST_NODES = 24


class SuffixOptions(Config):
    """``alpha``: nodes of a draft for each token of the match; ``nodes``: at most so many; auto: at most
    24, as many as pay on this machine by how often copies after such a match are right.
    ``chance``: a node that follows less often than that, its ancestors' shares included, is not drafted.
    ``chain``: one path in the place of a tree.
    ``memory``: tokens of past answers that are remembered, about 0.6 kB each; when there are more, the older half is
    forgotten. 0: none.
    """

    alpha: float = Field(2.0, gt=0.0)
    nodes: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = MOST_NODES
    chance: float = Field(0.1, ge=0.0, lt=1.0)
    chain: bool = False
    memory: Amount = Field(32768, ge=0)


class _Guess(NamedTuple):
    """A draft tree and its score: the expected number of tokens accepted, were what followed to follow again."""

    score: float
    found: Copy


class _Row:
    """What is known of a batch row.

    Attributes:
        tokens, prompt: the text, which the loop goes on writing, and its prompt's length. read: the text so far.
        in_past: state and length of its longest end that stands in past answers.
    """

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt, self.read = tokens, prompt, SuffixAutomaton()
        self.in_past = 0, 0

    def go_on(self, past: SuffixAutomaton, tokens: list[int]) -> None:
        """Follow tokens in past answers."""
        for token in tokens:
            self.in_past = past.step(*self.in_past, token)


class SuffixDrafter(Retrieval):
    """Reads prompt and answer into one structure, of each batch row its own, and complete answers into another."""

    name = "suffix"
    options = SuffixOptions

    def __init__(self, target: TargetModel, options: SuffixOptions) -> None:
        super().__init__(target, options)
        self.alpha, self.chance, self.chain, self.memory = options.alpha, options.chance, options.chain, options.memory
        self.policy = CopyPolicy() if options.nodes == "auto" else None
        self.nodes = self.max_draft = MOST_NODES if options.nodes == "auto" else options.nodes
        self.remembers = self.memory > 0 or self.policy is not None
        self._answers: list[int] = []  # past ones, with BETWEEN after each
        self._past = SuffixAutomaton()
        self._rows: list[_Row] = []

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        for row in self._rows:
            self._remember(row.tokens[row.prompt :])
        self._rows = [_Row(*row) for row in zip(state.tokens, state.prompt_lengths, strict=True)]

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        super().join(state, rows, part, output)
        for row in rows:
            ended = self._rows[row]
            self._remember(ended.tokens[ended.prompt :])
            self._rows[row] = _Row(state.tokens[row], state.prompt_lengths[row])
        for one in self._rows:  # past answers have other states now
            one.in_past = 0, 0
            one.go_on(self._past, one.tokens[: one.read.size])

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        one, past = self._rows[row], self._past
        new = state.tokens[row][one.read.size :]
        for token in new:
            one.read.read(token)
        one.go_on(past, new)
        longest = min(self.nodes, state.room(row) - 1)
        ends = (one.read, one.read.end()), (past, one.in_past)
        guesses = [self._best(some, *end, longest, state) for some, end in ends]
        return max(guesses, key=lambda guess: guess.score).found

    def _best(self, seen: SuffixAutomaton, at: int, match: int, longest: int, state: DecodeState) -> _Guess:
        """Of the trees after the text's end of ``match`` tokens and after its shorter ends, that of the best score."""
        best = _Guess(0.0, NOTHING)
        while at > 0 and (most := min(int(self.alpha * match), longest)) > best.score:  # no score is above the size
            best = max(best, self._grow(seen, at, match, most, state), key=lambda guess: guess.score)
            at = seen.link[at]
            match = seen.length[at]
        return best

    def _grow(self, seen: SuffixAutomaton, at: int, match: int, most: int, state: DecodeState) -> _Guess:
        """The tree after what a state stands for. Of equals, the one that stood last in the text is first."""

        def after(at: int) -> list[Next]:
            if at == seen.last:  # the end of the text itself: what followed its last place goes on here, too
                at = seen.end()[0]
            if at == 0:
                return []
            return [Next(token, seen.count[to], -seen.seen[to], to) for token, to in seen.follow[at].items()]

        return _Guess(*likeliest_tree(after, at, match, most, self.chance, state.eos, self.chain))

    def _remember(self, answer: list[int]) -> None:
        if not (answer and self.memory):
            return
        new = [*answer, BETWEEN]
        self._answers += new
        if len(self._answers) > self.memory:
            self._past, new = SuffixAutomaton(), self._answers[-(self.memory // 2) :]
            self._answers = list(new)
        for token in new:
            self._past.read(token)
