"""Sampling: warps as in transformers, draws without replacement, residuals."""

import itertools
import random
from functools import partial

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafters.loop import sampling
from drafters.loop.sampling import Sampling, draw, draw_without_replacement, residual


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.3, 0, 1.0), (1.7, 5, 1.0), (1.0, 0, 0.8), (0.7, 20, 0.9), (1.0, 1, 1.0), (1.3, 500, 0.01)],
)
def test_warps_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Catches another order of the warps, an off-by-one in top-k or top-p, and top-p that can empty the support."""
    logits = 3 * torch.randn(64, 97)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = Sampling(temperature, top_k, top_p).probabilities(logits)
    torch.testing.assert_close(found, expected.softmax(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(found > 0, expected.softmax(-1) > 0)


@pytest.mark.parametrize("sharpness", [6.0, 2.5, 0.1], ids=["256 suffice", "2048 suffice", "all are sorted"])
@pytest.mark.parametrize("top_k", [0, 40])
def test_top_p_of_a_large_vocabulary(sharpness: float, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens stay as where all are sorted, in rows of one batch that need few of them and many."""
    logits = sharpness * torch.randn(2, 3, 6000)
    logits[1, 1] *= 3
    found = Sampling(1.0, top_k, 0.95).probabilities(logits)
    most = int((found > 0).sum(-1).max())
    assert most < 256 if sharpness == 6 or top_k else 256 < most < 2048 if sharpness == 2.5 else most > 2048
    monkeypatch.setattr(sampling, "likeliest", lambda logits, p, mass: torch.sort(p, dim=-1, descending=True))
    assert torch.equal(found, Sampling(1.0, top_k, 0.95).probabilities(logits))


@pytest.mark.parametrize("vocab", [97, 6000], ids=["all are sorted", "256 are tried"])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.8), (0, 0.31), (20, 0.9), (7, 1.0)])
def test_equal_logits_stay_as_in_transformers(
    vocab: int, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the lowest ids of equal logits kept at the cut of top-p, and one of those equal to the k-th lost."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    logits = (4 * torch.randn(64, vocab)).round()  # about 15 values
    logits[1:2], logits[2, : vocab // 2] = 0.0, 9.0  # more equal ones than are tried
    found = Sampling(1.0, top_k, top_p).probabilities(logits)
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(found > 0, expected > -torch.inf)


def test_probabilities_are_float32_and_greedy_is_one_hot() -> None:
    """Catches bfloat16 probabilities, whose sums are off by a percent and whose residuals are noise."""
    logits = torch.randn(3, 11, dtype=torch.bfloat16)
    found = Sampling(0.5).probabilities(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(-1), torch.ones(3))
    assert torch.equal(Sampling().probabilities(logits).argmax(-1), logits.argmax(-1))
    assert Sampling().probabilities(logits).sum().item() == 3.0


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}]
    + [{"top_p": value} for value in (0.0, 1.1, -0.5, float("nan"))],
)
def test_out_of_range_is_refused(options: dict[str, float]) -> None:
    """Catches a NaN or a percentage that is silently taken as a probability."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)  # type: ignore[arg-type]


COLD = [1e-19, 1e-30, 1e-37, 1e-38, 1e-40, 1e-45, 1e-46, 5e-324]


@pytest.mark.parametrize("temperature", COLD)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.9)])
def test_the_limit_of_small_temperatures_is_greedy(temperature: float, top_k: int, top_p: float) -> None:
    """Catches NaN from logits / temperature beyond float32's range: an IndexError, or the token id V."""
    logits = 50 * torch.randn(64, 97)
    found = Sampling(temperature, top_k, top_p).probabilities(logits)
    assert torch.equal(found, Sampling().probabilities(logits))
    assert torch.equal(Sampling(temperature, top_k, top_p).pick(logits, torch.Generator()), logits.argmax(-1))


@pytest.mark.parametrize("temperature", COLD)
def test_equal_logits_share_at_small_temperatures(temperature: float) -> None:
    """Catches a limit that prefers one of several most likely tokens, and one that revives a masked token."""
    found = Sampling(temperature).probabilities(torch.tensor([[2.0, 3.0, 3.0, float("-inf")]]))
    assert found.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_draw_follows_the_distribution() -> None:
    """Catches an exponential race run the wrong way round, and one random number for all rows."""
    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    found = draw(p.expand(200_000, -1), torch.Generator().manual_seed(0)).bincount(minlength=5) / 200_000
    assert (found - p).abs().sum() / 2 < 0.004


@pytest.mark.parametrize("total", [1.0, 0.5, 2.0**-143], ids=["p", "what is left of p", "hardly anything is left"])
def test_draw_at_the_ends_of_the_random_numbers(total: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a token of probability 0 drawn at u = 0 or where u meets the sum so far, and the id V at the largest u,
    which rounding puts on the total. Compared with whole numbers: 64ths of the total, many of them 0."""
    rng = random.Random(0)
    sums = [[*sorted(rng.choices(range(65), k=8)), 64] for _ in range(2000)]
    uniform = [rng.choice([0.0, 1 - 2**-24, rng.randrange(64) / 64]) for _ in sums]
    counts = torch.tensor(sums).diff(dim=1, prepend=torch.zeros(2000, 1, dtype=torch.long))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(uniform)[:, None])
    expected = [
        next(i for i, so_far in enumerate(line) if so_far > 64 * u) for line, u in zip(sums, uniform, strict=True)
    ]
    assert draw(counts * (total / 64), None).tolist() == expected


def test_draws_without_replacement_at_the_ends_of_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a token that can be drawn and is said to be none at u = 0, and one of probability 0 that is drawn at
    either end. Compared with Gumbel's race in float64."""
    rng = random.Random(0)
    for _ in range(200):
        p = torch.tensor([rng.choice([0.0, rng.random()]) for _ in range(6)] + [rng.random()])
        uniform = torch.tensor([rng.choice([0.0, 1 - 2**-24, rng.random()]) for _ in p])
        monkeypatch.setattr(torch, "rand", lambda *_, uniform=uniform, **__: uniform.clone())
        tokens, valid = draw_without_replacement(p / p.sum(), 4, None)
        race = p.double() / -uniform.double().clamp_min(2**-24.5).log()
        order = [int(token) for token in race.argsort(descending=True) if p[token] > 0][:4]
        assert tokens[valid].tolist() == order and valid.tolist() == [place < len(order) for place in range(4)]


def test_draws_without_replacement_in_order() -> None:
    """Catches draws that are distinct but not sequential: P(a then b) must be q(a) q(b) / (1 - q(a)), exactly."""
    q = torch.tensor([0.55, 0.25, 0.15, 0.05])
    tokens, valid = draw_without_replacement(q.expand(300_000, -1), 2, torch.Generator().manual_seed(0))
    assert bool(valid.all())
    found = (tokens[:, 0] * 4 + tokens[:, 1]).bincount(minlength=16) / len(tokens)
    expected = torch.zeros(16)
    for a, b in itertools.permutations(range(4), 2):
        expected[a * 4 + b] = q[a] * q[b] / (1 - q[a])
    assert (found - expected).abs().sum() / 2 < 0.004
    included = torch.stack([(tokens == token).any(-1).float().mean() for token in range(4)])
    torch.testing.assert_close(included, expected.view(4, 4).sum(0) + expected.view(4, 4).sum(1), atol=0.004, rtol=0)


def test_draws_beyond_the_support_are_marked() -> None:
    """Catches zero-probability tokens returned as real draws (torch.multinomial does that silently)."""
    q = torch.tensor([[0.0, 0.7, 0.0, 0.3], [1.0, 0.0, 0.0, 0.0]])
    tokens, valid = draw_without_replacement(q.repeat(1000, 1), 3, torch.Generator().manual_seed(0))
    assert valid.tolist() == [[True, True, False], [True, False, False]] * 1000
    assert set(tokens[0::2, :2].flatten().tolist()) == {1, 3} and set(tokens[1::2, 0].tolist()) == {0}


def test_residual() -> None:
    """Catches 0/0 where p equals q, and a residual that is not renormalised. By hand."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.equal(residual(p, p), p)
    rest = residual(torch.tensor([0.4, 0.4, 0.2]), torch.tensor([0.3, 0.2, 0.5]))
    torch.testing.assert_close(rest, torch.tensor([1 / 3, 2 / 3, 0.0]))


def test_residual_of_one_hot_zeroes_the_token() -> None:
    """Catches a deterministic child that can still be drawn after its rejection."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    found = residual(p, torch.tensor([[0.0, 1.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[5 / 7, 0.0, 2 / 7]]))
