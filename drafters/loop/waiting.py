"""Whose tokens a batch waits for: it ends with the last of its rows."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafters.loop.acceptance import Verdict
    from drafters.loop.generate import DecodeState

USUAL = 8.0  # steps at the batch's own pace that a row's is reckoned with, before it has shown one
CAME = 0.5  # of what copies promise a batch, to its last row, before anything is known
DOUBT = 8.0  # promised tokens that this counts for
MEMORY = 0.9  # of the past batches
LEAST = 0.05  # share of a promise that is believed in any case


def weights(made: Sequence[int], room: Sequence[int], steps: int) -> list[float]:
    """What a token of each row brings the batch's end nearer by, 1 on average.

    A row needs about its room over its pace in further steps. The last row to end is the one whose steps are most. How
    many they will be is known but to the root of their number, as of a count, and to their number over the root of the
    steps that the pace was taken of. With noise of that size (Gumbel's), the odds of being last are a softmax.

    Args:
        made: tokens of each unfinished row in ``steps`` steps. room: what it may still make.
    """
    mean = sum(made) / len(made)
    pace = [(each + USUAL * mean / max(steps, 1)) / (steps + USUAL) for each in made]
    left = [each / max(speed, 1.0) for each, speed in zip(room, pace, strict=True)]
    most = max(left)
    noise = math.sqrt(max(most, 1.0) + most**2 / (steps + USUAL))
    odds = [math.exp((each - most) / noise) for each in left]
    return [len(odds) * each / sum(odds) for each in odds]


def trials(weights: Sequence[float]) -> list[float]:
    """What to learn from each row's verdict for, as shares of a trial: what the batch waits for counts in full."""
    most = max(weights) or 1.0
    return [each / most for each in weights]


class Hindsight:
    """How much of what drafts promise a batch comes to the row that it waits for in the end.

    By ``weights`` a draft is worth what it brings the rows that are likely to be the last. But a row that it is right
    for is by that less likely to be, so that the last one has had less than its odds beforehand: in SmolLM2's answers,
    in batches of four, a third of what copies promise and five sixths of what EAGLE's drafts do. Which row was the last
    is known when a batch has ended.

    Args:
        share: before anything is known.
    """

    def __init__(self, share: float = CAME) -> None:
        self._prior = share
        self._promised, self._came = DOUBT, share * DOUBT
        self._begin()

    def _begin(self) -> None:
        self._total, self._more = 0.0, 0.0  # promised, had all come to the last row: by its steps, by the present one
        self._made: list[int] = []  # tokens more than one, by row, in the steps that promised them
        self._last: list[int] = []

    @property
    def share(self) -> float:
        """Of the promised tokens, 1 at most; more than nothing."""
        return min(max(self._came / self._promised, LEAST), 1.0)

    def promise(self, tokens: float, share: float) -> None:
        """The step's draft promises a row so many tokens, of those beyond the first a ``share`` being counted."""
        self._more = (tokens - 1.0) / share

    def look_back(self, state: "DecodeState", verdict: "Verdict") -> None:
        """The step was committed."""
        more, self._more = self._more, 0.0
        if state.waits:
            self.step(more, [len(tokens) for tokens in verdict.tokens], state.finished)

    def step(self, promised: float, made: Sequence[int], finished: Sequence[bool]) -> None:
        """A step's draft promised so many tokens more than one (0: it had none, or another's), as the rows are weighed;
        each row has ``made`` so many, and may have ``finished`` by now."""
        self._last = [row for row, ended in enumerate(finished) if not ended]
        if promised > 0.0:
            self._total += promised
            self._made = [sum(both) - 1 for both in zip(self._made or [0] * len(made), made, strict=True)]

    def settle(self) -> None:
        """The batch has ended: with the rows that went on longest. Where nothing was promised, distrust fades."""
        if self._last:
            promised, came, weight = DOUBT, self._prior * DOUBT, 1.0 - MEMORY
            if self._total:
                promised, came, weight = self._total, sum(self._made[row] for row in self._last) / len(self._last), 1.0
            self._promised = MEMORY * self._promised + weight * promised
            self._came = MEMORY * self._came + weight * came
        self._begin()
