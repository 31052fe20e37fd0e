"""MJSD: acceptance by joint likelihood in hand-worked cases, and its beam search against brute force."""

import math

import conformance
import pytest
import torch
from rigged import perturbed
from test_bild import logits_after

from drafters import Sampling, TargetModel, generate
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.papers.mjsd import JointLikelihood, MJSDDrafter

TestItself = conformance.brief(
    lambda target: MJSDDrafter.from_options(target, draft_model=target, gamma=4, beams=3),
    families=("llama", "mistral-sliding"),
    longest_draft=4,
)
TestNear = conformance.suite(
    lambda target: MJSDDrafter.from_options(
        target, draft_model=perturbed(target, 0.05), gamma=3, beams=2, threshold=0.5
    ),
    accepts="some",
    families=("llama", "mixtral"),
    longest_draft=3,
)


# The rule.


def verdict(
    p: list[float],
    q: list[float],
    threshold: float,
    valid: list[bool] | None = None,
    sampling: Sampling | None = None,
    warped: bool = False,
) -> list[int]:
    """Committed tokens for the draft 0, 1, 2, ... of probabilities q, which the target gives ``logits_after(p)``."""
    draft = DraftTree.chain(torch.arange(len(p))[None], valid=None if valid is None else torch.tensor([valid]))
    draft.extra.log_q = torch.tensor([q]).log()
    found = JointLikelihood(threshold, warped)(draft, logits_after(p), draft.ancestors(), sampling or Sampling(), None)
    assert found.rows[0] == list(range(len(found.tokens[0])))
    return found.tokens[0]


@pytest.mark.parametrize(
    ("p", "q", "threshold", "tokens"),
    [
        # Figure 2: p/q of the prefixes are 0.5, 0.025 (fails), 0.225 (passes again) and 0.056 (fails).
        ([0.4, 0.04, 0.9, 0.1], [0.8, 0.8, 0.1, 0.4], 0.1, [0, 1, 2, 33]),
        ([0.8, 0.02], [0.1, 0.8], 0.1, [0, 1, 32]),  # 8, then 0.2; a ratio clipped before would give 0.025
        ([0.01, 0.1], [0.9, 0.9], 0.1, [30]),
        ([0.3, 0.3], [0.5, 0.5], 0.1, [0, 1, 32]),
        ([0.001, 0.001], [0.9, 0.9], 0.0, [0, 1, 32]),  # 0 accepts all that is possible, 1 nothing (Figure 4)
        ([0.9, 0.9], [0.1, 0.1], 1.0, [0]),  # the bonus is the target's argmax, here the draft's token
    ],
)
def test_longest_passing_prefix(p: list[float], q: list[float], threshold: float, tokens: list[int]) -> None:
    """Catches stopping at the first failing prefix, min(1, .) carried on, a wrong bonus, an inclusive comparison."""
    assert verdict(p, q, threshold) == tokens


TOP_TWO, TOP_ONE, COLD = Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.55), Sampling(0.5)


@pytest.mark.parametrize("sampling", [Sampling(), TOP_TWO, TOP_ONE, COLD])
def test_ratio_of_own_likelihoods(sampling: Sampling) -> None:
    """Catches p with temperature, top-k or top-p in a ratio whose q has none: here it would be 0 or 1, or 0.03 of q."""
    committed = verdict([0.4, 0.15], [0.8, 0.6], 0.1, sampling=sampling)
    assert committed == [0, 1, 32]  # 0.5, then 0.125 by the models' own; top-p 0.55 leaves neither token


def test_ratio_of_warped_likelihoods() -> None:
    """Catches a warped ratio that leaves out a warp, or that lets a token through which the target cannot draw.

    0.4 beside 0.6 is 0.16/0.52 = 0.308 at temperature 0.5, and 0 under top-p 0.55.
    """
    for q, rows in ((0.4, 1), (0.5, 0)):  # 0.308/0.4 = 0.77, 0.308/0.5 = 0.615
        assert len(verdict([0.4], [q], 0.7, sampling=COLD, warped=True)) == 1 + rows
    assert verdict([0.4, 0.9], [0.4, 0.1], 0.0, sampling=TOP_ONE, warped=True) == [30]
    assert verdict([0.4], [0.8], 0.45, sampling=Sampling(), warped=True) == [0, 31]  # greedy decoding has no warp


def test_invalid_nodes() -> None:
    """Catches nodes behind an EOS accepted because they count as certain."""
    assert verdict([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], 0.1, valid=[True, True, False]) == [0, 1, 2]


def test_long_drafts_do_not_underflow() -> None:
    """Catches products of probabilities instead of sums of logarithms: 20 factors of 1e-3 are 0 in float32."""
    assert len(verdict([1e-3] * 20, [1e-3] * 20, 0.5)) == 21


# The search.


def state_of(
    target: TargetModel, ids: list[int], temperature: float = 0.0, eos: tuple[int, ...] = (), **warps: float
) -> DecodeState:
    sampling, generator = Sampling(temperature, **warps), torch.Generator().manual_seed(0)  # type: ignore[arg-type]
    return DecodeState(target, [list(ids)], 32, 20, sampling, generator, frozenset(eos))


def log_likelihood(model: TargetModel, ids: list[int], tail: list[int], warp: Sampling | None = None) -> torch.Tensor:
    """``[len(tail)]`` log-probability of each token of ``tail`` after ``ids`` and those before; warped or as it is."""
    logits = model.model(torch.tensor([ids + tail])).logits[0, len(ids) - 1 : -1]
    log_p = logits.log_softmax(-1) if warp is None else warp.probabilities(logits).log()
    return log_p[torch.arange(len(tail)), torch.tensor(tail)]


WARP = Sampling(2.0, top_k=5, top_p=0.9)


@pytest.mark.parametrize("likelihood", ["own", "warped"])
def test_likelihoods_of_a_sampled_run(likelihood: str) -> None:
    """Catches p or q of the other kind, in the beams or in the ratio: both by whole forwards of the stock models."""
    target = conformance.target_of("llama")
    draft_model = perturbed(target, 0.2)
    drafter = MJSDDrafter.from_options(
        target, draft_model=draft_model, gamma=3, beams=3, threshold=0.3, likelihood=likelihood
    )
    go, steps = drafter.propose, []

    def record(state: DecodeState) -> DraftTree:
        steps.append((list(state.tokens[0]), go(state)))
        return steps[-1][1]

    def ratios(ids: list[int], tail: list[int], kind: str) -> list[float]:
        warp = WARP if kind == "warped" else None
        log_p, log_q = (log_likelihood(model, ids, tail, warp) for model in (target, draft_model))
        if kind == likelihood:
            torch.testing.assert_close(draft.extra.log_q[0], log_q, atol=1e-3, rtol=1e-3)
        return (log_p.cumsum(0) - log_q.cumsum(0)).tolist()

    drafter.propose = record  # type: ignore[method-assign]
    sampled = {"temperature": WARP.temperature, "top_k": WARP.top_k, "top_p": WARP.top_p}
    told_apart = 0
    for seed in range(2):
        steps.clear()
        trace = generate(
            target, drafter, [conformance.prompt(9, seed)], max_new_tokens=30, eos_token_id=[], seed=seed, **sampled
        ).trace  # type: ignore[arg-type]
        for (ids, draft), step in zip(steps, trace.steps, strict=True):
            if draft.size < 3:
                continue
            longest = {}
            for kind in ("own", "warped"):
                found = ratios(ids, draft.tokens[0].tolist(), kind)
                longest[kind] = max((j + 1 for j, ratio in enumerate(found) if ratio > math.log(0.3)), default=0)
            assert step.accepted == longest[likelihood]
            told_apart += longest["own"] != longest["warped"]
    assert told_apart >= 3
