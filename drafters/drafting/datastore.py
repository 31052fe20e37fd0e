"""Datastore of REST (He et al. 2023): the tokens of many texts and their suffix array, in one safetensors file.

The file is mapped into memory, so that a lookup reads only the parts it needs. ``python -m data_prep.datastore`` makes
one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafters.drafting.retrieval import BETWEEN
from drafters.drafting.token_file import check_range, load_tokens
from drafters.model.target import TargetModel

CONTENT, MADE = "datastore", "python -m data_prep.datastore makes one"


class Datastore(NamedTuple):
    """Texts and their suffix array (Manber and Myers 1990).

    Attributes:
        tokens: int32 ``[n]``, ``BETWEEN`` after each text.
        suffixes: int32 ``[n]``: start of each suffix, sorted by the suffixes' tokens.
    """

    tokens: np.ndarray
    suffixes: np.ndarray

    def find(self, text: Sequence[int], shortest: int, longest: int) -> tuple[int, range]:
        """Find the longest match of the last tokens of ``text``.

        Args:
            shortest: least length of a match in tokens.
            longest: greatest length of a match in tokens.

        Returns:
            The length of the match, and the range of ``suffixes`` that begin with it; 0 and an empty range without one.
        """
        # Bisect over the length: if n tokens match, n - 1 match too.
        sizes = range(shortest, min(longest, len(text)) + 1)
        match = shortest + bisect_left(sizes, True, key=lambda size: self._first(text[-size:]) is None) - 1
        first = self._first(text[-match:]) if match >= shortest else None
        if first is None:
            return 0, range(0)
        part = list(text[-match:])
        return match, range(first, bisect_right(self.suffixes, part, lo=first, key=self._begin(match)))

    def _first(self, part: Sequence[int]) -> int | None:
        """Index of the first of ``suffixes`` that begins with ``part``; None without one."""
        begin, wanted = self._begin(len(part)), list(part)
        place = bisect_left(self.suffixes, wanted, key=begin)
        return place if place < len(self.suffixes) and begin(self.suffixes[place]) == wanted else None

    def _begin(self, size: int) -> Callable[[int], list[int]]:
        """Return a function from the start of a suffix to its first ``size`` tokens."""
        tokens = self.tokens
        return lambda at: tokens[at : at + size].tolist()


def load_datastore(path: str, target: TargetModel) -> Datastore:
    """Map a datastore into memory.

    Raises:
        ValueError: no such file, an incomplete or other file, or a datastore of another vocabulary.
    """
    store = Datastore(*load_tokens(Path(path), CONTENT, Datastore._fields, target, MADE))
    size = len(store.tokens)
    if len(store.suffixes) != size or not size:
        raise ValueError(f"{path} is damaged: it has {size} tokens and {len(store.suffixes)} suffixes; {MADE}")
    check_range(Path(path), "tokens", store.tokens, BETWEEN, target.vocab_size - 1, MADE)
    check_range(Path(path), "suffixes", store.suffixes, 0, size - 1, MADE)
    return store
