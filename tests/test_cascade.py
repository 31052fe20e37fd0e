"""Cascades: a draft model accelerated by a drafter drafts what it would have drafted alone."""

from collections.abc import Callable

import conformance
import pytest
import torch
from conformance import NO_EOS, each_draft, prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy
from rigged import eagle, perturbed

from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.autoregressive import AutoregressiveDrafter
from drafters.methods.papers.cascade import CascadeDrafter
from drafters.methods.papers.mjsd import MJSDDrafter
from drafters.methods.papers.spectr import SpecTrDrafter
from drafters.methods.speculative import SpeculativeDrafter


def cascade(target: TargetModel, noise: float, inner_noise: float, gamma: int = 4, inner_gamma: int = 2) -> Drafter:
    """Target <- draft model <- inner draft model, each the one before with noise."""
    draft_model = perturbed(target, noise)
    inner = SpeculativeDrafter.from_options(
        draft_model, draft_model=perturbed(draft_model, inner_noise, seed=1), gamma=inner_gamma
    )
    return CascadeDrafter.from_options(target, draft_model=draft_model, inner=inner, gamma=gamma)


def single(target: TargetModel) -> Drafter:
    """No cascade: the draft model drafts alone."""
    return SpeculativeDrafter.from_options(target, draft_model=perturbed(target, 0.05), gamma=3)


def of_three(target: TargetModel) -> Drafter:
    """Target <- draft model <- draft model <- draft model."""
    inner = cascade(perturbed(target, 0.05), 0.05, 0.05, gamma=3, inner_gamma=1)
    return CascadeDrafter.from_options(target, draft_model=inner.target, inner=inner, gamma=3)


def tree_inside(target: TargetModel) -> Drafter:
    """The inner drafts are trees: accepted nodes are seldom the first rows of the draft model's forward."""
    draft_model = perturbed(target, 0.05)
    inner = SpecTrDrafter.from_options(
        draft_model, draft_model=perturbed(draft_model, 0.05, seed=1), gamma=3, drafts=4, draft_temperature=0.7
    )
    return CascadeDrafter.from_options(target, draft_model=draft_model, inner=inner, gamma=4)


TestAll = conformance.brief(lambda t: cascade(t, 0.0, 0.0), accepts="all", families=("llama", "qwen3"))
TestSome = conformance.suite(lambda t: cascade(t, 0.05, 0.05), accepts="some")
TestStrangerInside = conformance.brief(lambda t: cascade(t, 0.05, 1.0), accepts="some", families=("mistral-sliding",))
TestOfThree = pytest.mark.long(conformance.suite(of_three, accepts="some", families=("llama",)))
TestTreeInside = conformance.brief(tree_inside, accepts="some", families=("llama",))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [single, lambda t: cascade(t, 0.05, 0.05), tree_inside])
def test_drafts_are_the_draft_models(make, temperature: float) -> None:  # noqa: ANN001
    """Catches rejected tokens left in a draft cache, a token that it lacks, q of another row: only tau would fall."""
    target = target_of("llama")
    drafter = make(target)
    draft_model = drafter.draft_model
    seen = set()

    def checked(state: DecodeState, draft: DraftTree) -> None:
        if draft.size == 0:
            return
        known = state.tokens[0]
        whole = torch.tensor([known + draft.tokens[0].tolist()])
        logits = draft_model.model(whole).logits[:, len(known) - 1 : -1]
        if temperature == 0:
            assert draft.q is None and draft.tokens.tolist() == logits.argmax(-1).tolist()
        else:
            expected = Sampling(temperature, 30, 0.95).probabilities(logits)
            torch.testing.assert_close(draft.q, expected, atol=1e-4, rtol=1e-3)

    with each_draft(drafter, checked):
        for seed in range(3):
            options = {"max_new_tokens": 24, "eos_token_id": NO_EOS, "top_k": 30, "top_p": 0.95, "seed": seed}
            trace = generate(target, drafter, [prompt(8, seed)], temperature=temperature, **options).trace
            seen |= {step.accepted for step in trace.steps}
    assert 0 in seen and max(seen) >= 3, "the rig must reject and accept whole drafts"


def toy_cascade(target: TargetModel) -> Drafter:
    draft_model = toy(1, 1)
    return CascadeDrafter.from_options(
        target,
        draft_model=draft_model,
        inner=SpeculativeDrafter.from_options(draft_model, draft_model=toy(2, 1), gamma=1),
        gamma=2,
    )


def toy_trees(target: TargetModel) -> Drafter:
    draft_model = toy(1, 1)
    inner = SpecTrDrafter.from_options(draft_model, draft_model=perturbed(draft_model, 0.3), gamma=2, drafts=3)
    return CascadeDrafter.from_options(target, draft_model=draft_model, inner=inner, gamma=3)


@pytest.mark.parametrize(("make", "warp"), [(toy_cascade, 0), (toy_trees, 1)])
def test_output_is_distributed_as_the_targets(make: Callable[[TargetModel], Drafter], warp: int) -> None:
    """Catches q of the inner model instead of the draft model's, or residuals of the wrong level."""
    assert deviation(make(toy()), WARPS[warp]) < LIMIT


def test_unfit_inner_drafters_are_refused() -> None:
    """Catches inner drafters that would break losslessness or cannot follow the target's corrections."""
    target = target_of("llama")
    draft_model = perturbed(target, 0.05)
    with pytest.raises(ValueError, match="'mjsd' is lossy"):
        CascadeDrafter.from_options(
            target, draft_model=draft_model, inner=MJSDDrafter.from_options(draft_model, draft_model=draft_model)
        )
    with pytest.raises(ValueError, match="'eagle' cannot take back"):
        CascadeDrafter.from_options(target, draft_model=draft_model, inner=eagle(draft_model, None, "chain"))
    with pytest.raises(ValueError, match="was built for"):
        CascadeDrafter.from_options(target, draft_model=draft_model, inner=AutoregressiveDrafter.from_options(target))
    with pytest.raises(ValueError, match="inner must name its drafter"):
        make_drafter("cascade", target, draft_model=draft_model, inner={"gamma": 2})
    with pytest.raises(ValueError, match="gamma"):
        make_drafter("cascade", target, draft_model=draft_model, inner={"drafter": "autoregressive"}, gamma=0)
