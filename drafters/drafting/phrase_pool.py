"""Phrases by their first token, for methods that draft from n-grams seen before (Lookahead, Ouroboros)."""

from collections.abc import Iterator, Sequence

from drafters.loop.state import until


class PhrasePool:
    """First token -> its continuations ("tails"), most recently used last; full, it drops what was used longest ago.

    A phrase of length beta is a first token and a tail of at most beta - 1 tokens. A tail that begins another one of
    the same first token says nothing that the longer one does not, so only the longer is kept.

    Args:
        tail: most tokens of a tail; longer ones are cut.
        per_token: most tails of one first token.
        capacity: most tails in all.
    """

    def __init__(self, tail: int, per_token: int, capacity: int = 100_000) -> None:
        self.tail, self.per_token, self.capacity = tail, per_token, capacity
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # dicts keep their order: the oldest stands first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every (first token, tail), the oldest first: adding them to an empty pool in this order gives this pool."""
        for first, tails in self._tails.items():
            for tail in tails:
                yield first, tail

    def add(self, first: int, tail: Sequence[int], eos: frozenset[int] = frozenset()) -> None:
        """Remember a phrase, or that it was used. EOS ends a phrase and begins none."""
        new = tuple(until(tail[: self.tail], eos))
        if not new or first in eos:
            return
        tails = self._tails.pop(first, {})
        self._tails[first] = tails  # now the most recently used first token
        before = len(tails)
        if new in tails:
            del tails[new]
        else:
            for old in list(tails):
                if old[: len(new)] == new:  # the longer one is there already
                    new = old
                    del tails[old]
                    break
                if new[: len(old)] == old:
                    del tails[old]
        tails[new] = None
        if len(tails) > self.per_token:
            del tails[next(iter(tails))]
        self._size += len(tails) - before
        if self._size > self.capacity:  # drop the oldest tail of the first token that was used longest ago
            oldest = next(iter(self._tails))
            self._remove(oldest, next(iter(self._tails[oldest])))

    def replace(self, first: int, old: tuple[int, ...], new: Sequence[int], eos: frozenset[int] = frozenset()) -> None:
        """Overwrite a phrase by a better one of the same first token."""
        self._remove(first, old)
        self.add(first, new, eos)

    def get(self, first: int, most: int) -> list[tuple[int, ...]]:
        """Up to ``most`` tails, the most recently used first."""
        tails = self._tails.get(first)
        if not tails:
            return []
        return list(reversed(tails))[:most]

    def copy(self) -> "PhrasePool":
        """Another pool with the same phrases."""
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


class PhraseWindow:
    """The two-dimensional window of guesses that phrases are read off (lookahead decoding, Fu et al. 2024).

    Level 0 guesses the tokens after the root, level l the same columns l tokens further; the root stands at level 0,
    column 0. Every forward guesses one level more from the last one; the root, a column's tokens and its new guess
    form a phrase, and the lowest level is dropped. A guess sees its column and level 0 to the left of it: a tree.

    Args:
        width: columns, the phrases gained by each forward.
        levels: kept at once; phrases have levels + 1 tokens.
    """

    def __init__(self, width: int, levels: int) -> None:
        self.width, self.levels = width, levels
        self._guesses: list[list[int]] = []
        self._placeholders = True

    def start(self, tokens: list[int]) -> None:
        """Begin a prompt; level 0 is filled with its last tokens, which are placeholders and never become phrases."""
        columns = self.width + self.levels - 1  # filling costs one column a level
        tail = tokens[-columns:]
        self._guesses = [(tail * (columns // len(tail) + 1))[:columns]]
        self._placeholders = True

    @property
    def tokens(self) -> list[int]:
        """The guesses, level by level, without the root's place."""
        return [token for level in self._guesses for token in level][1:]

    @property
    def most_tokens(self) -> int:
        """The longest that ``tokens`` gets: while the window fills, a level is gained and a column lost each time."""
        columns = self.width + self.levels
        return max(level * (columns - level) for level in range(1, self.levels + 1)) - 1

    @property
    def outputs(self) -> int:
        """How many of the last rows predict new guesses (where there is one level, the root's row does too)."""
        return len(self._guesses[0]) - (len(self._guesses) == 1)

    def parents(self, root: int, first: int) -> list[int]:
        """Parent of each of ``tokens`` where the root is node ``root`` and they are the nodes from ``first`` on."""
        width = len(self._guesses[0])
        below = [root, *range(first, first + width - 1)]
        parents = below[:-1]
        for level in range(1, len(self._guesses)):
            parents += below
            start = first + level * width - 1
            below = list(range(start, start + width))
        return parents

    def advance(self, root: int, root_prediction: int, predictions: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Take in a forward's ``predictions`` (argmax of the last ``outputs`` rows); returns the phrases completed."""
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
