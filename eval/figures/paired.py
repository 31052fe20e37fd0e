"""Two measurements of the same prompts: did a figure change by more than chance would have it?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = 10_000
BLOCK = 1_000  # drawn at once, for memory's sake


@dataclass(frozen=True)
class Change:
    """Of a figure from A to B; ``ratio_ci``: 95%, paired bootstrap over ``prompts``. p_value: of no change at all.

    Both allow for what two measurements differ by on all prompts alike, as far as ``change`` was told of it.
    """

    a: float
    b: float
    ratio: float
    ratio_ci: tuple[float, float]
    p_value: float
    prompts: int


# Sums over some prompts, one a row: figures that are no function of sums (a mean of ratios) are none of these.
Figure = Callable[[np.ndarray], np.ndarray]


def change(a: np.ndarray, b: np.ndarray, figure: Figure, between: float = 0.0, seed: int = 0) -> Change:
    """How ``figure`` of the sums of a measurement's columns differs between ``a [n, k]`` and ``b [n, k]``.

    The p-value is a sign-flip test's: where both measure the same thing, the two of a prompt might as well have been
    swapped, so that the change found is one of all those that swapping gives. It holds for any number of prompts (of
    five, none can be significant), where a bootstrap's tails would need many.

    Args:
        figure: of sums ``[..., k]``, above 0.
        between: standard deviation of the logarithm of what two measurements of the same thing differ by on all
            prompts alike, which no number of prompts tells. The p-value is then at least that of a normal deviate
            whose variance is this one's and the sign flips' together, and the interval is as much wider.
    """
    generator, n = np.random.default_rng(seed), len(a)
    found = np.log(figure(b.sum(0)) / figure(a.sum(0)))
    drawn, flipped = [], []
    for _ in range(SAMPLES // BLOCK):
        times = generator.multinomial(n, np.full(n, 1 / n), size=BLOCK).astype(float)
        drawn.append(figure(times @ b) / figure(times @ a))
        swapped = generator.integers(2, size=(BLOCK, n)).astype(float)
        ratios = figure(swapped @ a + (1 - swapped) @ b) / figure(swapped @ b + (1 - swapped) @ a)
        flipped.append(np.log(ratios))
    by_chance = np.concatenate(flipped)
    p_value = (int((np.abs(by_chance) >= abs(found) - 1e-12).sum()) + 1) / (SAMPLES + 1)
    low, high = np.log(np.percentile(np.concatenate(drawn), [2.5, 97.5]))
    if between:
        p_value = max(p_value, math.erfc(abs(found) / math.hypot(by_chance.std(), between) / math.sqrt(2)))
        low, high = found - math.hypot(found - low, 1.96 * between), found + math.hypot(high - found, 1.96 * between)
    values = float(figure(a.sum(0))), float(figure(b.sum(0)))
    return Change(*values, float(np.exp(found)), (float(np.exp(low)), float(np.exp(high))), p_value, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below 5% somewhere by chance in at most one family of twenty."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = most
    return adjusted
