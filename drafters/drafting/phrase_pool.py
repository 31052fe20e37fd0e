"""Phrase pool and window of guesses, for methods that draft n-grams seen before (Lookahead, Ouroboros).

``PhrasePool`` is the n-gram pool, ``PhraseWindow`` the two-dimensional window of Jacobi iterations that fills it. A
drafter can begin with the pool of an earlier run, which is saved in one file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from drafters.drafting.token_file import check_range, load_tokens, model_facts, save_tokens
from drafters.loop.state import until
from drafters.model.target import TargetModel

CONTENT, MADE = "phrase pool", "write one with a drafter's save_pool(path)"
ARRAYS = ("first", "lengths", "tails")  # [n] first tokens, [n] lengths of the tails, tokens of all tails in turn


class PhrasePool:
    """Phrases by first token, in order of use; when it is full, the least recently used phrase is evicted.

    A phrase of length beta is a first token and a tail of at most beta - 1 tokens. A tail that is a prefix of another
    tail of the same first token is not stored.

    Args:
        tail: most tokens of a tail; longer ones are cut.
        per_token: most tails of one first token.
        capacity: most tails in all.
    """

    def __init__(self, tail: int, per_token: int, capacity: int = 100_000) -> None:
        self.tail, self.per_token, self.capacity = tail, per_token, capacity
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # least recently used first, at both levels
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every (first token, tail), least recently used first: adding them in this order rebuilds the pool."""
        for first, tails in self._tails.items():
            for tail in tails:
                yield first, tail

    def add(self, first: int, tail: Sequence[int], eos: frozenset[int] = frozenset()) -> None:
        """Add a phrase, or mark it as used. EOS ends a phrase and never begins one."""
        new = tuple(until(tail[: self.tail], eos))
        if not new or first in eos:
            return
        tails = self._tails.pop(first, {})
        self._tails[first] = tails  # moves it to the end: the most recently used
        before = len(tails)
        if new in tails:
            del tails[new]
        else:
            for old in list(tails):
                if old[: len(new)] == new:  # a prefix of a known tail: that one is used
                    new = old
                    del tails[old]
                    break
                if new[: len(old)] == old:
                    del tails[old]
        tails[new] = None
        if len(tails) > self.per_token:
            del tails[next(iter(tails))]
        self._size += len(tails) - before
        if self._size > self.capacity:  # evict the oldest tail of the least recently used first token
            oldest = next(iter(self._tails))
            self._remove(oldest, next(iter(self._tails[oldest])))

    def replace(self, first: int, old: tuple[int, ...], new: Sequence[int], eos: frozenset[int] = frozenset()) -> None:
        """Replace a phrase by another one of the same first token."""
        self._remove(first, old)
        self.add(first, new, eos)

    def get(self, first: int, most: int) -> list[tuple[int, ...]]:
        """Up to ``most`` tails, most recently used first."""
        return list(reversed(self._tails.get(first, {})))[:most]

    def copy(self) -> "PhrasePool":
        """An independent pool with the same phrases."""
        pool = PhrasePool(self.tail, self.per_token, self.capacity)
        pool._tails = {first: tails.copy() for first, tails in self._tails.items()}
        pool._size = self._size
        return pool

    def _remove(self, first: int, tail: tuple[int, ...]) -> None:
        tails = self._tails.get(first, {})
        if tail in tails:
            del tails[tail]
            self._size -= 1
            if not tails:
                del self._tails[first]


def save_pool(path: str | Path, pool: PhrasePool, model: TargetModel) -> None:
    """Write a pool of ``model``'s token ids, in the pool's order; raises OSError if the file cannot be written."""
    phrases = list(pool.items())
    first, lengths = [first for first, _ in phrases], [len(tail) for _, tail in phrases]
    columns = first, lengths, [token for _, tail in phrases for token in tail]
    arrays = {name: np.array(column, dtype=np.int32) for name, column in zip(ARRAYS, columns, strict=True)}
    save_tokens(Path(path), CONTENT, arrays, {"tail": str(pool.tail), **model_facts(model)})


def first_pool(path: str | None, model: TargetModel, tail: int, per_token: int) -> PhrasePool:
    """The pool that a drafter begins with: the saved one, or an empty one if ``path`` is None."""
    return PhrasePool(tail, per_token) if path is None else load_pool(path, model, tail, per_token)


def load_pool(path: str | Path, model: TargetModel, tail: int, per_token: int) -> PhrasePool:
    """Load a pool. Tails are cut to ``tail`` tokens, and the ``per_token`` most recently used ones are loaded.

    Raises:
        ValueError: no such file, an incomplete or other file, or a pool of another vocabulary.
    """
    path = Path(path)
    first, lengths, tails = load_tokens(path, CONTENT, ARRAYS, model, MADE)
    if len(first) != len(lengths) or bool((lengths < 1).any()) or int(lengths.sum(dtype=np.int64)) != len(tails):
        raise ValueError(
            f"{path} is damaged: {len(first)} phrases, lengths that sum to {lengths.sum()}, {len(tails)} tokens; {MADE}"
        )
    for name, ids in (("first", first), ("tails", tails)):
        check_range(path, name, ids, 0, model.vocab_size - 1, MADE)
    pool, start, tokens = PhrasePool(tail, per_token), 0, tails.tolist()
    for token, length in zip(first.tolist(), lengths.tolist(), strict=True):
        pool.add(token, tokens[start : start + length])
        start += length
    return pool


class PhraseWindow:
    """Two-dimensional window of guesses, the lookahead branch (lookahead decoding, Fu et al. 2024).

    Column 0 of level 0 is the root; the other columns guess the tokens after it. Level l guesses the tokens l places
    further. The argmaxes after the last level are a new level. The tokens of a column then form a phrase, and level 0
    is dropped. A guess attends to its column and to the columns left of it in level 0, so the window is a tree.

    Args:
        width: columns: phrases gained per forward.
        levels: levels of the full window; phrases have ``levels + 1`` tokens.
    """

    def __init__(self, width: int, levels: int) -> None:
        self.width, self.levels = width, levels
        self._guesses: list[list[int]] = []
        self._placeholders = True  # level 0 holds no guesses of the target yet

    def start(self, tokens: list[int]) -> None:
        """Begin a prompt: its last tokens fill level 0 as placeholders, which never become phrases."""
        columns = self.width + self.levels - 1  # each added level costs one column
        tail = tokens[-columns:]
        self._guesses = [(tail * (columns // len(tail) + 1))[:columns]]
        self._placeholders = True

    @property
    def tokens(self) -> list[int]:
        """The guesses, level by level, without the root."""
        return [token for level in self._guesses for token in level][1:]

    @property
    def most_tokens(self) -> int:
        """Largest length of ``tokens``, also while the window fills."""
        columns = self.width + self.levels
        return max(level * (columns - level) for level in range(1, self.levels + 1)) - 1

    @property
    def outputs(self) -> int:
        """Number of last tokens that predict the new level. With one level, the root predicts one guess more."""
        return len(self._guesses[0]) - (len(self._guesses) == 1)

    def parents(self, root: int, first: int) -> list[int]:
        """Parent of each of ``tokens``, if the root is node ``root`` and they are the nodes from ``first`` on."""
        width = len(self._guesses[0])
        below = [root, *range(first, first + width - 1)]
        parents = below[:-1]
        for level in range(1, len(self._guesses)):
            parents += below
            start = first + level * width - 1
            below = list(range(start, start + width))
        return parents

    def advance(self, root: int, root_prediction: int, predictions: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Add a level of ``predictions``, the argmaxes of the last ``outputs`` tokens; return the completed phrases."""
        if len(self._guesses) == 1:
            predictions = [root_prediction, *predictions]
        if len(self._guesses) < self.levels:
            self._guesses = [level[1:] for level in [*self._guesses, predictions]]
            return []
        first = [root, *self._guesses[0][1:]]
        columns = zip(first, *self._guesses[1:], predictions, strict=True)
        phrases = [(column[0], column[1:]) for column in columns]
        if self._placeholders:
            phrases = phrases[:1]
        self._guesses = [*self._guesses[1:], predictions]
        self._placeholders = False
        return phrases
