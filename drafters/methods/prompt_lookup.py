"""Prompt lookup decoding (Saxena 2023): copy what followed an earlier occurrence of the last tokens. Untrained."""

from typing import Annotated, Literal

from pydantic import Field

from drafters.config import Config, DraftSize
from drafters.drafting.retrieval import Copy, Retrieval
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.copies import CopyPolicy

LONGEST = 16  # tokens that gamma: auto drafts
INDEXED = 3  # longest n-grams in the index, in tokens; longer matches are found from these, which saves memory


class PromptLookupOptions(Config):
    """Options.

    ``gamma``: most tokens of a draft; auto drafts as many as are profitable by step costs and acceptance, at most 16.
    ``max_ngram``: tokens of the longest match; by default 3, or 8 with ``gamma: auto``.
    ``min_ngram``: tokens of the shortest match.
    """

    gamma: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = 10
    max_ngram: int | None = Field(None, ge=1, le=32)
    min_ngram: int = Field(1, ge=1, le=32)


class PromptLookupDrafter(Retrieval):
    """Looks up the last tokens in prompt and output, the longest n-gram first, and drafts what followed them there.

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
        self.max_ngram, self.min_ngram = options.max_ngram or (8 if auto else 3), options.min_ngram
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}; swap them")
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

    def rewind(self, state: DecodeState, length: int) -> None:
        for index in self._rows:
            index.forget(length)


class NgramIndex:
    """Index of the n-grams of a text, updated when the text grows or shrinks at its end.

    Args:
        shortest: least length of a match in tokens.
        longest: greatest length of a match in tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes, self._longest = range(shortest, min(longest, max(shortest, INDEXED)) + 1), longest
        self._tokens: list[int] = []
        # n-gram -> the ends of its occurrences, ascending; ``forget`` removes the last ones. An n-gram is added when
        # the token after it is read, so the end of the text never matches itself.
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def read(self, tokens: list[int]) -> None:
        """Read the tokens appended to ``tokens``; those read before must be unchanged."""
        for end in range(len(self._tokens), len(tokens)):
            for ngram in self._ending(tokens, end):
                self._ends.setdefault(ngram, []).append(end)
        self._tokens += tokens[len(self._tokens) :]

    def forget(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        for end in range(len(self._tokens) - 1, length - 1, -1):
            for ngram in self._ending(self._tokens, end):
                self._ends[ngram].pop()
                if not self._ends[ngram]:
                    del self._ends[ngram]
        del self._tokens[length:]

    def _ending(self, tokens: list[int], end: int) -> list[tuple[int, ...]]:
        """The n-grams that end before ``tokens[end]``."""
        return [tuple(tokens[end - n : end]) for n in self._sizes if n <= end]

    def continuation(self, longest: int, stop: frozenset[int]) -> list[int]:
        """What followed the latest of the longest matches, at most ``longest`` tokens, up to the first in ``stop``.

        Beyond the end of the text, the copy continues with its own tokens, as in LZ77, so that a text in a loop is
        drafted to full length.
        """
        tokens, (size, end) = self._tokens, self.latest()
        copied: list[int] = []
        for at in range(end, end + longest if size else end):
            copied.append(tokens[at] if at < len(tokens) else copied[at - len(tokens)])
            if copied[-1] in stop:
                break
        return copied

    def latest(self) -> tuple[int, int]:
        """Length of the longest match of the last tokens, and the end of its latest occurrence; zeros without one."""
        for n in reversed(self._sizes):
            ends = self._ends.get(tuple(self._tokens[-n:]))  # a text shorter than n is no n-gram of the index
            if ends is not None:
                return (n, ends[-1]) if n < self._sizes[-1] else self._extended(n, ends)
        return 0, 0

    def _extended(self, size: int, ends: list[int]) -> tuple[int, int]:
        """As ``latest``, from the ``ends`` of matches of the longest indexed ``size``, which may be longer."""
        tokens, most, best = self._tokens, self._longest, (0, 0)
        for end in reversed(ends):
            n = size
            while n < most and n < end and tokens[end - n - 1] == tokens[-n - 1]:
                n += 1
            if n > best[0]:
                best = n, end
            if n == most:
                break
        return best
