"""SpecTr: K-SEQ worked by hand and by exact enumeration, and drafts that are independent samples of q."""

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from conformance import NO_EOS, prompt, target_of
from distribution import LIMIT, VOCAB, WARPS, deviation, toy
from enumeration import Q, accepted, bias, committed, deduplicated, sampled
from rigged import perturbed

from drafters import Sampling, TargetModel, generate
from drafters.drafting.merged_tree import MergedTree, Trials
from drafters.loop.acceptance import Rule
from drafters.loop.sampling import residual
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.papers.spectr import SpecTrDrafter, k_seq, solve_rho, verify_k_seq

# rho.

HALF = [0.5, 0.5]
WORKED = [
    # p, q, k, rho*, probability that one of k drafts is accepted
    ([0.25, 0.75], [0.75, 0.25], 2, (7 + math.sqrt(33)) / 8, None),
    ([0.5, 0.5], [1.0, 0.0], 2, 1 + math.sqrt(0.5), 0.5),
    ([0.25, 0.75], [0.75, 0.25], 1, 1.0, 0.5),
    (HALF, HALF, 3, 1.0, 1.0),
    ([1.0, 0.0], [0.0, 1.0], 4, 4.0, 0.0),
]


@pytest.mark.parametrize(("p", "q", "k", "rho", "chance"), WORKED)
def test_rho_worked_by_hand(p: list[float], q: list[float], k: int, rho: float, chance: float | None) -> None:
    """Catches a wrong equation, its wrong root, and 0/0 where p == q or where p and q have no token in common.

    For k = 2, 1 - (1 - beta)^2 = rho beta says rho = 2 - beta. With p = (1/4, 3/4), q = (3/4, 1/4) and rho <= 3,
    beta = 1/(4 rho) + 1/4, so rho^2 - 7/4 rho + 1/4 = 0 and rho = (7 + sqrt 33) / 8. With p = (1/2, 1/2), q = (1, 0),
    beta = 1/(2 rho), so rho^2 - 2 rho + 1/2 = 0 and rho = 1 + sqrt(1/2): one of two drafts passes with p(0) = 1/2.
    """
    p_, q_ = torch.tensor([p]), torch.tensor([q])
    found = solve_rho(p_, q_, torch.tensor([[k]]))
    assert found.item() == pytest.approx(rho, abs=6e-3) and found.item() >= rho - 1e-6
    beta = torch.minimum(q_, p_ / found).sum().item()
    assert 1 - (1 - beta) ** k == pytest.approx(rho * (2 - rho) if chance is None else chance, abs=1e-3)


def test_rho_is_the_smallest_valid_one() -> None:
    """Catches an end of the bisection on the wrong side: below rho* the residual is negative, far above tau is lost."""
    generator = torch.Generator().manual_seed(0)
    for k in (1, 2, 3, 8):
        logits = 2 * torch.randn(2, 50, 30, generator=generator, dtype=torch.float64)
        p, q = logits.softmax(-1)
        rho = solve_rho(p, q, torch.full((50, 1), k))
        beta = torch.minimum(q, p / rho).sum(1, keepdim=True)
        excess = rho * beta - (1 - (1 - beta) ** k)
        assert bool((excess > -1e-12).all()) and bool((excess < 4e-3).all())
        assert bool((rho >= 1).all()) and bool((rho <= k).all())


# The rule, over every draft of a toy vocabulary.


def rho_of_one(tree: MergedTree, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain speculative sampling of each draft, with the residual that K-SEQ would have."""
    with mock.patch("drafters.methods.papers.spectr.solve_rho", lambda p, q, k: torch.ones_like(p[:, :1])):
        return k_seq(tree, p)


def residual_of_one(tree: MergedTree, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leviathan's residual after K-SEQ's trials."""
    assert tree.q is not None
    return k_seq(tree, p)[0], residual(p, tree.q[0, tree.q_rows[:, 0]])


def rule_with(trials: Trials) -> Rule:
    """K-SEQ with other trials."""

    def rule(draft, logits, see, sampling, generator):  # noqa: ANN001, ANN202
        with mock.patch("drafters.methods.papers.spectr.k_seq", trials):
            return verify_k_seq(draft, logits, see, sampling, generator)

    return rule


def rho_of_all(tree: MergedTree, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest rho, which needs no solving: lossless, but accepts less."""
    with mock.patch("drafters.methods.papers.spectr.solve_rho", lambda p, q, k: k.to(p.dtype)):
        return k_seq(tree, p)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("table", [0, 1])
def test_committed_tokens_follow_the_target(k: int, table: int) -> None:
    """Catches any bias in the next three tokens, with every way of two drafts to begin alike: exact to rounding."""
    assert bias(committed([Q[table]] * k, k_seq)) < 1e-12


def as_it_is(tree: MergedTree) -> MergedTree:
    return tree


@pytest.mark.parametrize(
    ("change", "trials"), [(deduplicated, k_seq), (as_it_is, rho_of_one), (as_it_is, residual_of_one)]
)
def test_the_enumeration_sees_wrong_rules(change: Callable[..., MergedTree], trials: Trials) -> None:
    """Catches an enumeration that cannot fail. Deduplicated, k_u would be the number of different tokens drafted."""
    assert bias(committed([Q[2]] * 2, trials, change)) > 0.02


def test_more_drafts_accept_more() -> None:
    """Catches a rho larger than need be, and drafts that are never tried. One draft passes with sum min(p, q) = 0.7.

    For two, by hand: p = (0.5, 0.3, 0.2), q = (0.2, 0.5, 0.3). For rho in [1, 2.5], beta = 0.2 + 0.5 / rho = 2 - rho,
    so rho^2 - 1.8 rho + 0.5 = 0, rho = 0.9 + sqrt(0.31) = 1.4568, and p_acc = rho beta = 0.79135.
    """
    chances = [accepted([Q[0]] * k, k_seq) for k in (1, 2, 3)]
    rho = 0.9 + math.sqrt(0.31)
    assert chances[0] == pytest.approx(0.7) and chances[1] == pytest.approx(rho * (2 - rho), abs=2e-4)
    assert chances[2] > chances[1] + 0.04
    assert bias(committed([Q[0]] * 2, rho_of_all)) < 1e-12
    assert accepted([Q[0]] * 2, rho_of_all) < chances[1] - 0.01


def test_one_draft_is_speculative_sampling() -> None:
    """Catches anything but min(1, p/q) and norm(max(0, p - q)) for k = 1 (Leviathan et al. 2023, Algorithm 1)."""
    p, q = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.tensor([[4, 0, 6]])
    chances, left = k_seq(MergedTree.merge(tokens, q[None], frozenset()), p)
    torch.testing.assert_close(chances, (p / q).gather(1, tokens.T))
    torch.testing.assert_close(left / left.sum(1, keepdim=True), residual(p, q))


def test_rule_draws_what_the_enumeration_says() -> None:
    """Catches what the enumeration leaves out: the random numbers, the walk and the bonus."""
    assert sampled([Q[0]] * 2, verify_k_seq, 3000) < 4.0
    assert sampled([Q[0]] * 2, rule_with(rho_of_one), 3000) > 8.0


# The drafter.


def state_of(target: TargetModel, ids: list[int], temperature: float, seed: int = 0) -> DecodeState:
    generator = torch.Generator().manual_seed(seed)
    return DecodeState(target, [list(ids)], 2000, 20, Sampling(temperature), generator, frozenset())


@torch.inference_mode()
def test_drafts_are_independent_samples() -> None:
    """Catches drafts that avoid or copy each other, and a level drawn after another draft's tokens.

    Tokens of 600 drafts side by side against q(x) q(y | x), and how often two neighbours begin alike against sum q^2.
    """
    target, ids = toy(), [1, 3]
    drafter = SpecTrDrafter.from_options(target, draft_model=target, gamma=2, drafts=600)
    state = state_of(target, ids, 1.0)
    drafter.begin(state, None)  # type: ignore[arg-type]
    first = target.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    second = target.model(torch.tensor([[*ids, x] for x in range(VOCAB)])).logits[:, -1].softmax(-1)
    draft = drafter.propose(state)
    assert isinstance(draft, MergedTree)
    paths = torch.tensor([[draft.trie.tokens[node] for node in path] for path in draft.trie.paths])
    counts = torch.bincount(paths[:, 0] * VOCAB + paths[:, 1], minlength=VOCAB**2)
    expected = 600 * (first[:, None] * second).flatten()
    statistic = ((counts - expected) ** 2 / expected)[expected > 1].sum()
    assert statistic < 60, f"chi-square {statistic:.0f} with {VOCAB**2 - 1} degrees of freedom"
    alike = (paths[1:, 0] == paths[:-1, 0]).float().mean()
    assert alike == pytest.approx(float((first**2).sum()), abs=0.08)
    assert draft.q is not None
    q = draft.q[0].view(600, 2, VOCAB)
    torch.testing.assert_close(q[:, 0], first.expand(600, -1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(q[:, 1], second[paths[:, 0]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("temperature", "draft_temperature"), [(1.0, None), (1.0, 0.7), (0.0, 0.7), (0.0, None)])
def test_draft_cache_follows_the_text(temperature: float, draft_temperature: float | None) -> None:
    """Catches rows of another draft kept in the draft model's cache, and q without its temperature or warps."""
    target = target_of("llama")
    draft_model = perturbed(target, 0.05)
    drafter = SpecTrDrafter.from_options(
        target, draft_model=draft_model, gamma=3, drafts=3, draft_temperature=draft_temperature
    )
    drawn, seen = drafter._draw, set()
    known: list[int] = []
    own = temperature if draft_temperature is None else draft_temperature

    def checked(features, sampling, generator):  # noqa: ANN001, ANN202
        tokens, q = drawn(features, sampling, generator)
        assert tokens.shape[0] == (3 if own > 0 else 1)
        for line, distributions in zip(tokens.tolist(), q, strict=True):
            logits = draft_model.model(torch.tensor([known + line])).logits[0, len(known) - 1 : -1]
            expected = Sampling(own, 30, 0.95).probabilities(logits)
            torch.testing.assert_close(distributions, expected, atol=1e-4, rtol=1e-3)
        seen.add(len({tuple(line) for line in tokens.tolist()}))
        return tokens, q

    propose = drafter.propose

    def noted(state: DecodeState) -> DraftTree:
        known[:] = state.tokens[0]
        return propose(state)

    accepted_lengths = set()
    with mock.patch.object(drafter, "_draw", checked), mock.patch.object(drafter, "propose", noted):
        for seed in range(3):
            options = {"max_new_tokens": 20, "eos_token_id": NO_EOS, "top_k": 30, "top_p": 0.95, "seed": seed}
            trace = generate(target, drafter, [prompt(8, seed)], temperature=temperature, **options).trace
            accepted_lengths |= {step.accepted for step in trace.steps}
    assert {0, 3} <= accepted_lengths and (max(seen) > 1) == (own > 0)


@pytest.mark.parametrize(("options", "warp"), [({"drafts": 4}, 0), ({"draft_temperature": 2.0, "gamma": 2}, 1)])
def test_output_is_distributed_as_the_targets(options: dict[str, float], warp: int) -> None:
    """Catches q without its warps, of another level or at another temperature, where the whole loop hands it over."""
    drafter = SpecTrDrafter.from_options(toy(), draft_model=toy(1, 1), **({"gamma": 3} | options))  # type: ignore[arg-type]
    assert deviation(drafter, WARPS[warp]) < LIMIT
