"""Prompt lookup decoding (Saxena 2023): what followed the last tokens earlier in the text follows again. Untrained."""

from typing import Annotated, Literal

from pydantic import Field

from drafters.config import Config, DraftSize
from drafters.drafting.retrieval import Copy, Retrieval
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.copies import CopyPolicy

LONGEST = 16  # tokens that gamma: auto drafts
INDEXED = 3  # tokens of the longest n-grams that have their places listed: most of those stood nowhere else


class PromptLookupOptions(Config):
    """``gamma``: most tokens a draft; auto: at most 16, as many as pay on this machine by how often copies after such a
    match are right.
    ``max_ngram``, ``min_ngram``: the longest and the shortest match looked for; by default 3 (auto: 8) and 1.
    """

    gamma: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = 10
    max_ngram: int | None = Field(None, ge=1, le=32)
    min_ngram: int = Field(1, ge=1, le=32)


class PromptLookupDrafter(Retrieval):
    """Finds the longest n-gram of the last tokens earlier in prompt and output, and drafts what followed it there.

    Raises:
        ValueError: ``min_ngram`` is above ``max_ngram``.
    """

    name = "prompt_lookup"
    options = PromptLookupOptions
    rewinds = True

    def __init__(self, target: TargetModel, options: PromptLookupOptions) -> None:
        super().__init__(target, options)
        auto = options.gamma == "auto"
        self.policy = CopyPolicy() if auto else None
        self.gamma = self.max_draft = LONGEST if options.gamma == "auto" else options.gamma
        self.remembers = auto
        self.max_ngram, self.min_ngram = options.max_ngram or (8 if auto else 3), options.min_ngram
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}: nothing lies between; swap them?"
            )
        self._rows: list[NgramIndex] = []

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._rows = [NgramIndex(self.min_ngram, self.max_ngram) for _ in range(state.batch)]
        for index, tokens in zip(self._rows, state.tokens, strict=True):
            index.read(tokens)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        super().join(state, rows, part, output)
        for row in rows:
            self._rows[row] = NgramIndex(self.min_ngram, self.max_ngram)

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        index = self._rows[row]
        index.read(state.tokens[row])
        tokens = index.continuation(min(self.gamma, state.room(row) - 1), state.eos)
        match = index.latest()[0] if tokens else 0
        return Copy(tokens, list(range(ROOT, len(tokens) - 1)), [0.5] * len(tokens), match)

    def rewind(self, state: DecodeState, kept: int) -> None:
        for index in self._rows:
            index.forget(kept)


class NgramIndex:
    """Where each n-gram of a text stood, kept up as the text grows and shrinks at its end.

    Args:
        shortest: the smallest length n of the n-grams.
        longest: the largest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes, self._longest = range(shortest, min(longest, max(shortest, INDEXED)) + 1), longest
        self._tokens: list[int] = []
        # n-gram -> where its occurrences end, ascending. All are kept, not just the last: ``forget`` must uncover the
        # one before. An n-gram enters with the token that follows it, so the end of the text never matches itself.
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def read(self, tokens: list[int]) -> None:
        """Read what was appended to ``tokens``; what was read before must still stand."""
        for end in range(len(self._tokens), len(tokens)):
            for ngram in self._ending(tokens, end):
                self._ends.setdefault(ngram, []).append(end)
        self._tokens += tokens[len(self._tokens) :]

    def forget(self, kept: int) -> None:
        """Forget all but the first ``kept`` tokens."""
        for end in range(len(self._tokens) - 1, kept - 1, -1):
            for ngram in self._ending(self._tokens, end):
                self._ends[ngram].pop()
                if not self._ends[ngram]:
                    del self._ends[ngram]
        del self._tokens[kept:]

    def _ending(self, tokens: list[int], end: int) -> list[tuple[int, ...]]:
        """The n-grams that end before ``tokens[end]``."""
        return [tuple(tokens[end - n : end]) for n in self._sizes if n <= end]

    def continuation(self, longest: int, stop: frozenset[int]) -> list[int]:
        """What followed the longest n-gram that ends the text: up to ``longest`` tokens, up to the first in ``stop``.

        Of several matches the most recent one counts: the topic, the names and the indentation of a text change as it
        goes on, and what comes next is most like what came last. A match that ends close to the text's end is copied
        into its own continuation, as LZ77 does, so that a text in a loop is drafted in full and not to the loop's end.
        """
        tokens, (size, end) = self._tokens, self.latest()
        found: list[int] = []
        for at in range(end, end + longest if size else end):
            found.append(tokens[at] if at < len(tokens) else found[at - len(tokens)])
            if found[-1] in stop:
                break
        return found

    def latest(self) -> tuple[int, int]:
        """The size n of the longest n-gram that ends the text and stood in it before, and where its last place ends.

        Zeros: none did.
        """
        for n in reversed(self._sizes):
            ends = self._ends.get(tuple(self._tokens[-n:]))  # of a text shorter than n: all of it, which is no match
            if ends is not None:
                return (n, ends[-1]) if n < self._sizes[-1] else self._longest_of(n, ends)
        return 0, 0

    def _longest_of(self, size: int, ends: list[int]) -> tuple[int, int]:
        """Of the places where the last ``size`` tokens end, that of the longest match; of several the last one."""
        tokens, most, found = self._tokens, self._longest, (0, 0)
        for end in reversed(ends):
            n = size
            while n < most and n < end and tokens[end - n - 1] == tokens[-n - 1]:
                n += 1
            if n > found[0]:
                found = n, end
            if n == most:
                break
        return found
