"""Whose tokens a batch waits for: it ends with the last of its rows."""

import math
from collections.abc import Sequence

USUAL = 8.0  # steps at the batch's own pace that a row's is reckoned with, before it has shown one


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
