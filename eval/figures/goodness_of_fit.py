"""Were tokens drawn from the distributions that they should be drawn from? Exact tests for a few thousand tokens.

The probability integral transform: where the tokens of the vocabulary lie one after another on [0, 1), each as long as
its probability, a token that is drawn from them lies uniformly, whatever the distribution (a point within its piece is
drawn at random). So places of tokens with all kinds of texts before them are one sample, independent and uniform, and
go into one test, or, by anything that was known before a token was drawn, into several: none of them is approximate
but for the chi-square distribution of the statistic.

In which order the tokens lie decides which mistakes show: it may be any that is fixed before the token is drawn.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

BINS = 8
FEWEST = 40 * BINS  # places to test: with 40 expected a bin the tail of the statistic is a chi-square's far out
POWER = 0.99


@dataclass(frozen=True)
class Fit:
    """Of one sample of places; ``distance``: the total variation that it would have caught with ``POWER``."""

    count: int
    statistic: float
    p_value: float
    distance: float


def places(p: Tensor, order: Tensor, tokens: Tensor, generator: np.random.Generator) -> Tensor:
    """Where ``tokens [n]`` lie on [0, 1), float64 ``[n]``, with the vocabulary laid out by falling ``order [n, V]``.

    Args:
        p: ``[n, V]`` what each was drawn from; need not be normalised. Ties of ``order`` lie by their ids.
        generator: numpy's, for torch's with the seed of a text would repeat the numbers that the text was drawn with.
    """
    p = p.double() / p.double().sum(1, keepdim=True)
    at = tokens[:, None]
    own, rank = p.gather(1, at), order.gather(1, at)
    ids = torch.arange(p.shape[1], device=p.device)
    before = (order > rank) | ((order == rank) & (ids < at))
    drawn = torch.from_numpy(generator.random((len(tokens), 1))).to(p.device)
    return ((p * before).sum(1, keepdim=True) + drawn * own)[:, 0]


def uniformity(sample: np.ndarray, level: float) -> Fit | None:
    """Pearson's test of places against the uniform distribution; None where there are fewer than ``FEWEST``.

    Args:
        level: below which p-value it fails, which decides what it would have caught.
    """
    count = len(sample)
    if count < FEWEST:
        return None
    found = np.bincount(np.minimum((sample * BINS).astype(int), BINS - 1), minlength=BINS)
    statistic = float(((found - count / BINS) ** 2).sum() / (count / BINS))
    return Fit(count, statistic, chi_square_tail(statistic, BINS - 1), detectable(count, level))


def detectable(count: int, level: float, bins: int = BINS) -> float:
    """The smallest total variation between the places' distribution and the uniform one that a test of ``count`` places
    at this level catches with ``POWER``, however it is spread over the bins.

    Bins that are off by d_k make the statistic a noncentral chi-square's, with noncentrality n K sum d_k^2. Of all that
    have sum |d_k| = 2 TV none has less of it than 4 n TV^2: half of the bins too full, half too empty, all alike.
    """
    return min(1.0, math.sqrt(_noncentrality(level, bins - 1) / (4 * count)))


@lru_cache(maxsize=16)
def _noncentrality(level: float, degrees: int) -> float:
    """Of what a test at this level catches with ``POWER``."""
    limit = _chi_square_quantile(level, degrees)
    low, high = 0.0, 4.0 * limit + 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _noncentral_tail(limit, degrees, middle) >= POWER else (middle, high)
    return high


def count_tail(observed: int, expected: float) -> float:
    """Two-sided p-value of a number of events whose chances, each given what came before it, sum to ``expected``.

    Poisson's tails: wider than those of a sum of chances, so the p-value is too large rather than too small.
    """
    few = _gamma_tail(observed + 1, expected)
    many = float(torch.special.gammainc(_double(observed), _double(expected))) if observed else 1.0
    return min(1.0, 2 * min(few, many))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The probability of more than ``statistic``."""
    return _gamma_tail(degrees / 2, statistic / 2)


def _gamma_tail(shape: float, value: float) -> float:
    return float(torch.special.gammaincc(_double(shape), _double(value)))


def _double(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _chi_square_quantile(level: float, degrees: int) -> float:
    low, high = 0.0, 2000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, degrees) > level else (low, middle)
    return high


def _noncentral_tail(limit: float, degrees: int, noncentrality: float) -> float:
    """A noncentral chi-square's, as the Poisson mixture of central ones that it is."""
    half = _double(noncentrality / 2)
    most = int(half + 12 * half.sqrt() + 40)
    number = torch.arange(most, dtype=torch.float64)
    weights = (torch.special.xlogy(number, half) - half - torch.lgamma(number + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + number, torch.full_like(number, limit / 2))
    return float((weights * tails).sum())
