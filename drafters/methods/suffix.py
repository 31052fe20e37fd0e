"""Suffix decoding (SuffixDecoding, Oliaro et al. 2024): copy from the text so far or from past answers. Untrained.

The draft is a tree of the tokens that most often followed an earlier occurrence of the text's last tokens; the longer
the match, the larger the tree.
"""

from typing import Annotated, Literal

from pydantic import Field

from drafters.config import Amount, Config, DraftSize
from drafters.drafting.retrieval import BETWEEN, NOTHING, Copy, Next, Retrieval, likeliest_tree
from drafters.drafting.suffix_automaton import SuffixAutomaton
from drafters.loop.state import DecodeState
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.copies import CopyPolicy

MOST_NODES = 24


class SuffixOptions(Config):
    """Options.

    ``alpha``: nodes of a draft per token of the match.
    ``nodes``: most nodes of a draft; auto drafts as many as are profitable by step costs and acceptance, at most 24.
    ``chance``: least probability of a node, by counts, given the match.
    ``chain``: draft one path instead of a tree.
    ``memory``: tokens of past answers that are searched too, about 0.6 kB each; beyond it the older half is dropped.
    """

    alpha: float = Field(2.0, gt=0.0)
    nodes: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = MOST_NODES
    chance: float = Field(0.1, ge=0.0, lt=1.0)
    chain: bool = False
    memory: Amount = Field(32768, ge=0)


class _Row:
    """State of a sequence.

    Attributes:
        tokens: the text, the list that the loop appends to.
        prompt: length of its prompt.
        read: automaton of the text so far.
        in_past: state and length of the longest suffix of the text that occurs in past answers.
    """

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt, self.read = tokens, prompt, SuffixAutomaton()
        self.in_past = 0, 0

    def follow(self, past: SuffixAutomaton, tokens: list[int]) -> None:
        """Follow the text's next tokens in past answers."""
        for token in tokens:
            self.in_past = past.step(*self.in_past, token)


class SuffixDrafter(Retrieval):
    """Searches two suffix automata: one per sequence, of its text, and one of past answers."""

    name = "suffix"
    options = SuffixOptions

    def __init__(self, target: TargetModel, options: SuffixOptions) -> None:
        super().__init__(target, options)
        if not options.chain:
            self.needs_trees("set chain: true")
        self.alpha, self.chance, self.chain, self.memory = options.alpha, options.chance, options.chain, options.memory
        self.policy = CopyPolicy() if options.nodes == "auto" else None
        self.nodes = self.max_draft = MOST_NODES if options.nodes == "auto" else options.nodes
        self.remembers = self.memory > 0
        self._answers: list[int] = []  # past ones, with BETWEEN after each
        self._past = SuffixAutomaton()  # of ``_answers``
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
        for one in self._rows:  # the automaton of past answers has changed
            one.in_past = 0, 0
            one.follow(self._past, one.tokens[: one.read.size])

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        one, past = self._rows[row], self._past
        new = state.tokens[row][one.read.size :]
        for token in new:
            one.read.read(token)
        one.follow(past, new)
        longest = min(self.nodes, state.room(row) - 1)
        matches = (one.read, *one.read.end()), (past, *one.in_past)
        return max((self._best(*match, longest, state) for match in matches), key=lambda best: best[0])[1]

    def _best(self, seen: SuffixAutomaton, at: int, match: int, longest: int, state: DecodeState) -> tuple[float, Copy]:
        """Best score and copy after a match (``match`` tokens, state ``at``) and after the shorter matches in it."""

        def after(at: int) -> list[Next]:
            if at == seen.last:  # nothing follows the end of the text: use the earlier occurrences of its suffix
                at = seen.end()[0]
            if at == 0:
                return []
            return [Next(token, seen.count[to], -seen.seen[to], to) for token, to in seen.follow[at].items()]

        best = 0.0, NOTHING
        while at > 0 and (most := min(int(self.alpha * match), longest)) > best[0]:  # a score is at most the size
            tree = likeliest_tree(after, at, match, most, self.chance, state.eos, self.chain)
            best = max(best, tree, key=lambda scored: scored[0])
            at = seen.link[at]
            match = seen.length[at]
        return best

    def _remember(self, answer: list[int]) -> None:
        """Add an answer to the past ones."""
        if not (answer and self.memory):
            return
        new = [*answer, BETWEEN]
        self._answers += new
        if len(self._answers) > self.memory:
            self._past, new = SuffixAutomaton(), self._answers[-(self.memory // 2) :]
            self._answers = list(new)
        for token in new:
            self._past.read(token)
