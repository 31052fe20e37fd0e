"""Replay: accepted as the profile says, at the inner drafter's cost, never mistaken for a lossless method."""

from itertools import accumulate
from operator import mul
from unittest import mock

import pytest
import torch
from conformance import NO_EOS, checked_commits, prompt, target_of
from rigged import eagle, kangaroo, perturbed

from drafters import generate, make_drafter
from drafters.methods.replay import ReplayDrafter
from drafters.methods.speculative import SpeculativeDrafter
from drafters.model.target import TargetModel

PAPER = [0.79, 0.74, 0.72, 0.73, 0.67]  # EAGLE, Table 1: n-alpha of Vicuna-7B


@pytest.mark.parametrize("kind", ["eagle-static", "eagle-dynamic", "eagle-chain", "kangaroo", "speculative"])
def test_acceptance_follows_the_profile(kind: str) -> None:
    """Catches a profile off by one level, and acceptance that hangs on what the untrained head happens to propose."""
    target = target_of("llama")
    if kind == "kangaroo":
        inner = kangaroo(target, False, eta=0.0, max_draft_tokens=5)
    elif kind == "speculative":
        inner = SpeculativeDrafter.from_options(target, draft_model=perturbed(target, 0.5), gamma=5)
    else:
        inner = eagle(target, None, kind.removeprefix("eagle-"), depth=5)
    drafter = ReplayDrafter.from_options(target, inner=inner, profile=PAPER)
    with checked_commits():
        generate(target, drafter, [prompt(9)], max_new_tokens=20, eos_token_id=NO_EOS)
    trace = generate(target, drafter, [prompt(5)], max_new_tokens=240, eos_token_id=NO_EOS).trace
    assert trace.steps[0].depth == 5
    assert trace.tau == pytest.approx(1 + sum(accumulate(map(drafter._rate, range(5)), mul)), rel=0.2)
    assert trace.tau > 2.5


def test_cost_is_the_inner_drafters() -> None:
    """Catches forwards left out: per step, target and head must be run as often as without replay."""
    target = target_of("llama")
    inner = eagle(target, None, "static")
    drafter = ReplayDrafter.from_options(target, inner=inner, profile=[0.0])  # as an untrained head
    for one in (inner, drafter):
        with mock.patch.object(inner.head, "extend", wraps=inner.head.extend) as head:
            trace = generate(target, one, [prompt(9)], max_new_tokens=10, eos_token_id=NO_EOS).trace
        assert head.call_count == 1 + sum(5 for step in trace.steps if step.drafted)
    assert trace.tau == 1.0


def test_it_is_never_taken_for_lossless() -> None:
    """Catches a report without the mark, sampling that the profile knows nothing of, and drafters of other targets."""
    target, other = target_of("llama"), target_of("qwen3")
    drafter = make_drafter("replay", target, inner={"drafter": "prompt_lookup"}, profile=[1.0])
    assert not drafter.lossless and drafter.name == "replay"
    with pytest.raises(ValueError, match="greedily only, found temperature 0.7"):
        generate(target, drafter, [prompt(5)], max_new_tokens=4, temperature=0.7)
    with pytest.raises(ValueError, match="built for target"):
        ReplayDrafter.from_options(target, inner=make_drafter("prompt_lookup", other), profile=[0.5])
    with pytest.raises(ValueError, match="must name its drafter"):
        make_drafter("replay", target, inner={}, profile=[0.5])
    for profile in ([], [1.2], [-0.1]):
        with pytest.raises(ValueError, match="profile"):
            make_drafter("replay", target, inner={"drafter": "prompt_lookup"}, profile=profile)
    assert isinstance(target, TargetModel) and torch.is_tensor(target.model.lm_head.weight)
