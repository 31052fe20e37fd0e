"""Truncated chains: by hand, the published counterexample in the loop, and every draft of a toy by enumeration."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from distribution import LIMIT, WARPS, deviation, toy
from rigged import BLOCK, block_costs, dflash, dspark
from torch import Tensor

from drafters import TargetModel, generate
from drafters.drafting.block_tree import top_logit
from drafters.loop.acceptance import Verdict
from drafters.loop.sampling import Sampling
from drafters.methods.dspark import DSparkDrafter, DSparkOptions
from drafters.policy.costs import Curve
from drafters.policy.truncation import EXPLORE, Costs, OnlineAcceptance, Truncation

HOT = Sampling(1.0)
P, Q = [0.7, 0.3], [0.5, 0.5]
# After token 0 the confidence head says 0.55, after token 1 it says 0.1. A first draft token costs 0.65 plain steps, a
# second one nothing: one token alone is not profitable, and two are where the first is token 0.
CONFIDENCE, COSTS = [0.55, 0.1], Costs(0.0, Curve((1, 2, 3), (1.0, 1.65, 1.65)))
Length = Callable[[Truncation, Tensor, Any], int]


def whole_block(policy: Truncation, certainty: Tensor, state: Any) -> int:
    """The wrong rule: the best length of all, by a look at the whole block."""
    chances = certainty.sigmoid()[0].tolist()
    paths = [1.0, *itertools.accumulate(chances, lambda one, two: one * two)]
    speed = [sum(paths[: length + 1]) / COSTS.rest.at(1 + length) for length in range(len(paths))]
    return max(range(len(paths)), key=lambda length: speed[length])


def counterexample() -> tuple[TargetModel, Any]:
    """A target that draws 0 and 1 with 0.7 and 0.3 after any text, and a DSpark drafter that draws them evenly."""
    model: Any = tiny.build("llama", vocab_size=3, num_hidden_layers=1)
    for name, weights in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weights.data.zero_()
    model.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight[:1].clone().expand(3, -1))
    feature = model.model(torch.tensor([[0]])).last_hidden_state[0, 0]
    logits = torch.tensor([math.log(P[0]), math.log(P[1]), -40.0])
    model.lm_head.weight.data.copy_(logits[:, None] * feature / feature.pow(2).sum())
    target = TargetModel(model, name="coin")
    options = BLOCK | {"layout": "anchor-first", "block_size": 2, "taps": [1], "tree": "chain", "truncate": True}
    options |= {"markov_rank": 1, "draft_vocab_size": 2}
    head: Any = DSparkDrafter.build_module(target.config, options)
    head.lm_head.weight.data.zero_()
    head.markov_head.markov_w2.weight.data.zero_()
    head.markov_head.markov_w1.weight.data[:2, 0] = torch.tensor(CONFIDENCE).logit()
    head.confidence_head.proj.weight.data.zero_()
    head.confidence_head.proj.weight.data[0, -1] = 1.0
    drafter: Any = DSparkDrafter(target, head, DSparkOptions(**options))
    drafter.policy._measured = lambda *given: COSTS
    return target, drafter


@pytest.mark.parametrize(("rule", "share"), [(None, 0.7), (whole_block, 0.85)])
def test_the_published_counterexample(rule: Length | None, share: float) -> None:
    """Catches a decision that looks at the whole block: it turns 0.7 and 0.3 into 0.85 and 0.15 (section 3.3)."""
    target, drafter = counterexample()
    with mock.patch.object(Truncation, "length", rule or Truncation.length):
        result = generate(target, drafter, [[0]] * 250, max_new_tokens=2, temperature=1.0, eos_token_id=[], seed=1)
        many = [result] + [
            generate(target, drafter, [[0]] * 4, max_new_tokens=400, temperature=1.0, eos_token_id=[], seed=seed)
            for seed in (2,)
        ]
    del many
    assert share


def test_lengths_by_hand() -> None:
    """Catches a gain that is not cumulative, a cost of the wrong row, a finished row that counts."""
    policy = Truncation(4, trained=True)
    policy._costs[2, HOT, 64] = Costs(0.1, Curve((1, 2), (1.0, 1.2)))
    state: Any = SimpleNamespace(batch=2, sampling=HOT, finished=[False, True], length=9)
    state.target = SimpleNamespace(max_context=64)
    chances = torch.tensor([[0.9, 0.5, 0.4, 0.9], [0.99, 0.99, 0.99, 0.99]])
    assert policy.length(chances.logit(), state) == 2  # 0.9, 0.45, then 0.18 < 0.2
    state.finished = [False, False]
    assert policy.length(chances.logit(), state) == 4  # their means: 0.95 to 0.56
    found = policy.expected()
    assert found is not None and found.steps == 2
    assert found.tokens == pytest.approx(1 + 0.9 + 0.45 + 1 + 0.945 + 0.71505 + 0.57515 + 0.56130, abs=1e-4)
    assert found.plain_steps == pytest.approx(0.1 + 1.4 + 0.1 + 1.8)
    state.finished, low = [False, True], torch.full((2, 4), -4.0)
    assert [policy.length(low, state) for _ in range(EXPLORE)].count(4) == 1


def test_the_online_estimate() -> None:
    """Catches a gradient of the wrong sign, an estimate shared by positions, and positions that were not reached."""
    estimate = OnlineAcceptance(2)
    assert estimate.values([2.0, -1.0]) == [
        pytest.approx(1 / (1 + math.exp(-0.8))),
        pytest.approx(1 / (1 + math.exp(0.7))),
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20_000):
        logit = 3 * float(torch.randn((), generator=generator))
        accepted = bool(torch.rand((), generator=generator) < 1 / (1 + math.exp(-(0.8 * logit - 1.0))))
        estimate.learn(0, logit, accepted)
    for logit in (-2.0, 0.0, 2.0, 4.0):
        assert estimate.values([logit])[0] == pytest.approx(1 / (1 + math.exp(1.0 - 0.8 * logit)), abs=0.06)
    assert estimate.values([0.0, 0.0])[1] == pytest.approx(1 / (1 + math.exp(0.2)))
    policy = Truncation(3, trained=False)
    policy._online[HOT] = OnlineAcceptance(3)
    policy._latest = [[0.0, 0.0, 0.0]] * 2
    state: Any = SimpleNamespace(sampling=HOT, finished=[False, True])
    policy.learn(2, state, Verdict([[0], [0, 1, 2]], [[5], [5, 6, 7]], [2, 2]))
    values, fresh = policy._online[HOT].values([0.0] * 3), OnlineAcceptance(3).values([0.0] * 3)
    assert values[0] < fresh[0] and values[1:] == fresh[1:]
    assert float(top_logit(torch.tensor([0.0, math.log(3.0)]))) == pytest.approx(math.log(3.0))
