"""Which tokens the last rows of a pruned LM head stand for: those of the text at hand, the latest met."""

from collections.abc import Sequence

Rows = Sequence[list[int]]


NOTHING: list[int] = []


def _alike(row: list[int], other: list[int], count: int) -> int:
    """How many tokens ``row`` begins with of the first ``count`` of what stood in its place."""
    if row is other or row[:count] == other[:count]:
        return min(count, len(row))
    pairs = enumerate(zip(row, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(count, len(row)))


class TextTokens:
    """Places for the tokens of a text that have none among the frequent ones; who was met longest ago gives way.

    Args:
        frequent: tokens that keep their places, from 0 on. spare: those that have the places behind them until the text
            needs these, the likeliest first. end: tokens from this id on get no place.
    """

    def __init__(self, frequent: list[int], spare: list[int], end: int | None = None) -> None:
        self._end = end
        self._frequent, self._spare, self._fixed, self._first = frequent, spare, frozenset(frequent), len(frequent)
        self._held = list(spare)  # by place, from the first that is not fixed
        self._places: dict[int, int] = {}  # of what is held, who gives way first coming first
        self._changed: dict[int, int] = {}  # since the last call of ``read``, as ``_held``
        self._rows: Rows = []
        self._read: list[tuple[list[int], int]] = []  # each row, and how much of it was read
        self._start()

    def read(self, rows: Rows) -> dict[int, int]:
        """Take in what each row of tokens has come to have since the last call, or all of rows that are others.

        Returns:
            Place -> token, of the places that changed.
        """
        before = self._held
        if rows is not self._rows:
            self._start()
            self._rows, self._read = rows, []
        known = [*self._read, *[(NOTHING, 0)] * (len(rows) - len(self._read))]
        new = [row[_alike(row, *before) :] for row, before in zip(rows, known, strict=False)]
        self._read = [(row, len(row)) for row in rows]
        # The end of every row last: where there is not room for all, none of them loses all of its own.
        for place in range(max(map(len, new), default=0), 0, -1):
            for part in new:
                if len(part) >= place and (token := part[-place]) not in self._fixed:
                    self._meet(token)
        if before is not self._held:
            both = enumerate(zip(before, self._held, strict=True))
            self._changed = {place: token for place, (old, token) in both if old != token}
        changed, self._changed = self._changed, {}
        return {self._first + place: token for place, token in changed.items()}

    def anew(self) -> "TextTokens":
        """The same before any text."""
        return TextTokens(self._frequent, self._spare, self._end)

    def __contains__(self, token: int) -> bool:
        return token in self._fixed or token in self._places

    def __len__(self) -> int:
        return len(self._fixed) + len(self._places)

    def _start(self) -> None:
        self._held = list(self._spare)
        self._places = {token: place for place, token in reversed(list(enumerate(self._spare)))}

    def _meet(self, token: int) -> None:
        if not self._spare or (self._end is not None and token >= self._end):
            return
        place = self._places.pop(token, None)
        if place is None:
            place = self._places.pop(next(iter(self._places)))
            self._held[place] = self._changed[place] = token
        self._places[token] = place
