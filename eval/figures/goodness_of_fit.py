"""Tests whether tokens were drawn from given distributions, for a few thousand tokens.

The probability integral transform: divide [0, 1) into one piece per token, as long as the token's probability, and take
a random point in the piece of the token drawn. These places are uniform and independent for any distributions, so
tokens after all kinds of texts are one sample. The sample may be divided by anything known before a token was drawn;
only the chi-square distribution of the statistic is approximate.

The order of the vocabulary decides which mistakes show; it must be fixed before the token is drawn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

BINS = 8
FEWEST = 40 * BINS  # places: with 40 expected per bin, the statistic has a chi-square's tail
POWER = 0.99


@dataclass(frozen=True)
class Fit:
    """Test of one sample of places; ``distance``: the total variation that it finds with probability ``POWER``."""

    count: int
    statistic: float
    p_value: float
    distance: float


def places(p: Tensor, order: Tensor, tokens: Tensor, generator: np.random.Generator) -> Tensor:
    """Return the places of ``tokens [n]`` on [0, 1), float64 ``[n]``, with the vocabulary by falling ``order [n, V]``.

    Args:
        p: ``[n, V]`` distribution of each token, need not be normalised. Ties of ``order`` are in order of ids.
        generator: numpy's, because torch's with the seed of a text would repeat the numbers that drew the text.
    """
    p = p.double() / p.double().sum(1, keepdim=True)
    at = tokens[:, None]
    mass, rank = p.gather(1, at), order.gather(1, at)
    ids = torch.arange(p.shape[1], device=p.device)
    before = (order > rank) | ((order == rank) & (ids < at))
    drawn = torch.from_numpy(generator.random((len(tokens), 1))).to(p.device)
    return ((p * before).sum(1, keepdim=True) + drawn * mass)[:, 0]


def uniformity(sample: np.ndarray, level: float) -> Fit | None:
    """Return Pearson's test of places against the uniform distribution; None below ``FEWEST`` places.

    Args:
        level: p-value below which it fails, which determines ``distance``.
    """
    count = len(sample)
    if count < FEWEST:
        return None
    observed = np.bincount(np.minimum((sample * BINS).astype(int), BINS - 1), minlength=BINS)
    statistic = float(((observed - count / BINS) ** 2).sum() / (count / BINS))
    return Fit(count, statistic, chi_square_tail(statistic, BINS - 1), detectable(count, level))


def detectable(count: int, level: float, bins: int = BINS) -> float:
    """Return the smallest total variation from the uniform distribution that a test of ``count`` places finds.

    Deviations d_k of the bins make the statistic noncentral chi-square with noncentrality n K sum d_k^2. For a given
    sum |d_k| = 2 TV its minimum is 4 n TV^2: half of the bins too full, half too empty, all by the same amount.
    """
    return min(1.0, math.sqrt(_noncentrality(level, bins - 1) / (4 * count)))


@lru_cache(maxsize=16)
def _noncentrality(level: float, degrees: int) -> float:
    """Return the noncentrality that a test at this level finds with probability ``POWER``."""
    limit = _first(lambda value: chi_square_tail(value, degrees) <= level, 2000.0)
    return _first(lambda value: _noncentral_tail(limit, degrees, value) >= POWER, 4.0 * limit + 100.0)


def _first(reached: Callable[[float], bool], high: float) -> float:
    """Return by bisection the smallest value up to ``high`` for which ``reached`` is true."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def count_tail(observed: int, expected: float) -> float:
    """Return the two-sided p-value of a number of events whose conditional probabilities sum to ``expected``.

    Poisson's tails are wider than those of such a sum, so the p-value is conservative.
    """
    few = _gamma_tail(observed + 1, expected)
    many = float(torch.special.gammainc(_double(observed), _double(expected))) if observed else 1.0
    return min(1.0, 2 * min(few, many))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability of more than ``statistic``."""
    return _gamma_tail(degrees / 2, statistic / 2)


def _gamma_tail(shape: float, value: float) -> float:
    return float(torch.special.gammaincc(_double(shape), _double(value)))


def _double(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _noncentral_tail(limit: float, degrees: int, noncentrality: float) -> float:
    """Return the tail of a noncentral chi-square, a Poisson mixture of central ones."""
    half = _double(noncentrality / 2)
    most = int(half + 12 * half.sqrt() + 40)
    number = torch.arange(most, dtype=torch.float64)
    weights = (torch.special.xlogy(number, half) - half - torch.lgamma(number + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + number, torch.full_like(number, limit / 2))
    return float((weights * tails).sum())
