"""Test whether a figure changed between two measurements of the same prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = 10_000
BLOCK = 1_000  # samples drawn at once, to bound memory


@dataclass(frozen=True)
class Change:
    """Change of a figure from A to B; ``ratio_ci``: 95%, paired bootstrap over ``prompts``; ``p_value``: of no change.

    Both include ``between``, see ``change``.
    """

    a: float
    b: float
    ratio: float
    ratio_ci: tuple[float, float]
    p_value: float
    prompts: int


# From sums over prompts ``[..., k]`` to a figure.
Figure = Callable[[np.ndarray], np.ndarray]


def change(a: np.ndarray, b: np.ndarray, figure: Figure, between: float = 0.0, seed: int = 0) -> Change:
    """Return the change of ``figure`` of the column sums from ``a [n, k]`` to ``b [n, k]``.

    The p-value is of a sign-flip test: if both measure the same thing, swapping the two of a prompt changes nothing. It
    holds for any number of prompts (with five, no change can be significant).

    Args:
        figure: function of sums ``[..., k]``, above 0.
        between: standard deviation of the logarithm of the factor between two measurements of the same thing, on all
            prompts alike. The p-value is at least that of a normal deviate with the variance of this and of the
            sign flips together, and the interval is wider accordingly.
    """
    generator, n = np.random.default_rng(seed), len(a)
    log_ratio = np.log(figure(b.sum(0)) / figure(a.sum(0)))
    drawn, flipped = [], []
    for _ in range(SAMPLES // BLOCK):
        times = generator.multinomial(n, np.full(n, 1 / n), size=BLOCK).astype(float)
        drawn.append(figure(times @ b) / figure(times @ a))
        swapped = generator.integers(2, size=(BLOCK, n)).astype(float)
        ratios = figure(swapped @ a + (1 - swapped) @ b) / figure(swapped @ b + (1 - swapped) @ a)
        flipped.append(np.log(ratios))
    by_chance = np.concatenate(flipped)
    p_value = (int((np.abs(by_chance) >= abs(log_ratio) - 1e-12).sum()) + 1) / (SAMPLES + 1)
    low, high = np.log(np.percentile(np.concatenate(drawn), [2.5, 97.5]))
    if between:
        p_value = max(p_value, math.erfc(abs(log_ratio) / math.hypot(by_chance.std(), between) / math.sqrt(2)))
        low = log_ratio - math.hypot(log_ratio - low, 1.96 * between)
        high = log_ratio + math.hypot(high - log_ratio, 1.96 * between)
    values = float(figure(a.sum(0))), float(figure(b.sum(0)))
    return Change(*values, float(np.exp(log_ratio)), (float(np.exp(low)), float(np.exp(high))), p_value, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: by chance, one is below 5% in at most one family of twenty."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = most
    return adjusted
