"""Suffix decoding (Oliaro et al. 2024, SuffixDecoding): what followed the text's end earlier on and in past answers, as
a tree of the likeliest tokens by how often they did; the longer the match, the larger the tree. Untrained.
"""

from typing import NamedTuple

from pydantic import Field

from .config import Config
from .decoding.loop import DecodeState
from .drafting.retrieval import BETWEEN, NOTHING, Found, Next, Retrieval, likeliest_tree
from .drafting.suffix_automaton import SuffixAutomaton
from .model.target import FeatureOutput, TargetModel


class SuffixOptions(Config):
    """``alpha``: nodes of a draft for each token of the match; ``nodes``: at most so many.
    ``chance``: a node that follows less often than that, its ancestors' shares included, is not drafted.
    ``memory``: tokens of past answers that are remembered, about 0.6 kB each; when there are more, the older half is
    forgotten. 0: none.
    """

    alpha: float = Field(2.0, gt=0.0)
    nodes: int = Field(24, ge=1)
    chance: float = Field(0.1, ge=0.0, lt=1.0)
    memory: int = Field(32768, ge=0)


class _Guess(NamedTuple):
    """A draft tree and its score: the expected number of tokens accepted, were what followed to follow again."""

    score: float
    found: Found


class SuffixDrafter(Retrieval):
    """Reads prompt and answer into one structure and, when an answer is complete, the answer into another."""

    name = "suffix"
    options = SuffixOptions

    def __init__(self, target: TargetModel, options: SuffixOptions) -> None:
        super().__init__(target, options)
        self.alpha, self.nodes, self.chance, self.memory = options.alpha, options.nodes, options.chance, options.memory
        self.max_draft, self.remembers = self.nodes, self.memory > 0
        self._answers: list[int] = []  # past ones, with BETWEEN after each
        self._past = SuffixAutomaton()
        self._known: tuple[list[int], int] = [], 0  # a text that the loop goes on writing, its prompt's length

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        text, prompt = self._known
        self._remember(text[prompt:])
        self._known = state.tokens[0], state.prompt_lengths[0]
        self._text = SuffixAutomaton()
        self._in_past = 0, 0  # state and length of the text's longest end that stands in past answers

    def retrieve(self, state: DecodeState, row: int = 0) -> Found:
        text, past = self._text, self._past
        for token in state.tokens[row][text.size :]:
            text.read(token)
            self._in_past = past.step(*self._in_past, token)
        longest = min(self.nodes, state.room(row) - 1)
        guesses = [self._best(some, *end, longest, state) for some, end in ((text, text.end()), (past, self._in_past))]
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

        return _Guess(*likeliest_tree(after, at, match, most, self.chance, state.eos))

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
