"""Which tokens the last rows of a pruned LM head stand for: those of the text at hand, the latest met."""

from collections.abc import Sequence

Rows = Sequence[list[int]]


class TextTokens:
    """Places for the tokens of a text that have none among the frequent ones; who was met longest ago gives way.

    Args:
        frequent: tokens that keep their places, from 0 on. spare: those that have the places behind them until the text
            needs these, the likeliest first.
    """

    def __init__(self, frequent: list[int], spare: list[int]) -> None:
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
        same = [known if row is known[0] else (row, 0) for row, known in zip(rows, self._read, strict=False)]
        self._read = [(row, len(row)) for row in rows]
        known = [start for _, start in same] + [0] * (len(rows) - len(same))
        for row, start in zip(rows, known, strict=True):
            for token in row[start:]:
                if token not in self._fixed:
                    self._meet(token)
        if before is not self._held:
            both = enumerate(zip(before, self._held, strict=True))
            self._changed = {place: token for place, (old, token) in both if old != token}
        changed, self._changed = self._changed, {}
        return {self._first + place: token for place, token in changed.items()}

    def anew(self) -> "TextTokens":
        """The same before any text."""
        return TextTokens(self._frequent, self._spare)

    def __contains__(self, token: int) -> bool:
        return token in self._fixed or token in self._places

    def __len__(self) -> int:
        return len(self._fixed) + len(self._places)

    def _start(self) -> None:
        self._held = list(self._spare)
        self._places = {token: place for place, token in reversed(list(enumerate(self._spare)))}

    def _meet(self, token: int) -> None:
        if not self._spare:
            return
        place = self._places.pop(token, None)
        if place is None:
            place = self._places.pop(next(iter(self._places)))
            self._held[place] = self._changed[place] = token
        self._places[token] = place
