"""Truncated chains: by hand, the published counterexample in the loop, and every draft of a toy by enumeration."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from by_keys import new_drafter, new_head
from conformance import prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy
from enumeration import VOCAB, Q, after, bias
from enumeration import P as P_TABLE
from rigged import BLOCK, Cycling, block_costs, dflash, dflash2, dspark, peagle
from torch import Tensor

from drafters import TargetModel, generate
from drafters.drafting.grow import top_logit
from drafters.drafting.tree_plan import chain_plan
from drafters.loop.acceptance import Verdict
from drafters.loop.sampling import Sampling, residual
from drafters.methods.block import DSparkDrafter
from drafters.policy.costs import Curve
from drafters.policy.truncation import EXPLORE, Costs, OnlineAcceptance, Truncation

HOT = Sampling(1.0)
P = [0.7, 0.3]
DEPTH = 2
TOY: dict[str, Any] = {"taps": [1, 2]}
FEW: dict[str, Any] = {"selector_top_k": 3, "conv_group_size": 4}  # of DFlash2
# After token 0 the confidence head says 0.55, after token 1 it says 0.1. A first draft token costs 0.65 plain steps, a
# second one nothing: one token alone is not profitable, and two are where the first is token 0.
CONFIDENCE, COSTS = [0.55, 0.1], Costs(0.0, Curve((1, 2, 3), (1.0, 1.65, 1.65)))
# Here a first one costs 0.05 and a second one 0.12: one token always, and two where the first is token 0.
VARYING = Costs(0.0, Curve((1, 2, 3), (1.0, 1.05, 1.17)))


def whole_block(policy: Truncation, certainty: Tensor, state: Any) -> int:
    """The wrong rule: the best length of all, by a look at the whole block."""
    chances = certainty.sigmoid()[0].tolist()
    paths = [1.0, *itertools.accumulate(chances, lambda one, two: one * two)]
    speed = [sum(paths[: length + 1]) / COSTS.rest.at(1 + length) for length in range(len(paths))]
    return max(range(len(paths)), key=lambda length: speed[length])


def counterexample(costs: Costs = COSTS) -> Any:
    """A DSpark drafter that draws 0 and 1 evenly, for a target that draws them with 0.7 and 0.3 after any text."""
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
    head: Any = new_head(DSparkDrafter, target.config, **options)
    head.lm_head.weight.data.zero_()
    head.markov_head.markov_w2.weight.data.zero_()
    head.markov_head.markov_w1.weight.data[:2, 0] = torch.tensor(CONFIDENCE).logit()
    head.confidence_head.proj.weight.data.zero_()
    head.confidence_head.proj.weight.data[0, -1] = 1.0
    drafter: Any = new_drafter(DSparkDrafter, target, head, **options)
    drafter.policy._measured = lambda *given: costs
    return drafter


def after_token_0(drafter: Any, texts: int = 8, tokens: int = 160) -> tuple[float, Counter[int]]:
    """Of the steps behind a token 0: the share of token 0 among their first tokens, and how many verify each length."""
    found, lengths = [], Counter[int]()
    for seed in range(texts):
        options: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 1.0, "eos_token_id": []}
        result = generate(drafter.target, drafter, [[0]], seed=seed, **options)
        row, at = result.tokens[0].tolist(), 1
        for step in result.trace.steps:
            if row[at - 1] == 0:
                found.append(row[at])
                lengths[step.drafted] += 1
            at += step.committed
    assert set(found) == {0, 1} and len(found) > 500
    return found.count(0) / len(found), lengths


def test_the_published_counterexample() -> None:
    """Catches a decision that looks at the whole block: it turns 0.7 and 0.3 into 0.85 and 0.15 (section 3.3).

    The share has a standard error of 0.016. With the published costs our rule verifies nothing.
    """
    share, lengths = after_token_0(counterexample())
    assert share == pytest.approx(0.7, abs=0.05) and {*lengths} == {0}
    with mock.patch.object(Truncation, "length", whole_block):
        share, _ = after_token_0(counterexample())
    assert share == pytest.approx(0.85, abs=0.05)


def test_lengths_that_vary_with_the_tokens() -> None:
    """Catches a rule that is right only where it verifies nothing: here it verifies one token or two, by the first."""
    share, lengths = after_token_0(counterexample(VARYING), texts=12)
    assert share == pytest.approx(0.7, abs=0.05)
    assert lengths[1] > 100 and lengths[2] > 100 and lengths[0] <= 12, lengths  # 0: the last token of a text


def committed(length: Callable[[Tensor], int], confidence: dict[tuple[int, ...], float], peeks: bool) -> Tensor:
    """``[V] * (D + 1)``: exact distribution of the next tokens, over all drafts of D tokens by enumeration.py's q.

    Args:
        length: the rule, of ``[1, D]`` logits. confidence: by the tokens before a position.
        peeks: wrong on purpose: the confidence of a position reads the position's own token.
    """
    result = torch.zeros((VOCAB,) * (DEPTH + 1), dtype=torch.float64)

    def spread(path: tuple[int, ...], weight: float) -> None:
        if len(path) == DEPTH + 1:
            result[path] += weight
        elif weight > 0:
            for token, probability in enumerate(after(P_TABLE, path).tolist()):
                spread((*path, token), weight * probability)

    for draft in itertools.product(range(VOCAB), repeat=DEPTH):
        contexts = [draft[:place] for place in range(DEPTH)]
        weight = math.prod(float(after(Q[0], path)[x]) for path, x in zip(contexts, draft, strict=True))
        read = [draft[: place + peeks] for place in range(DEPTH)]
        count = length(torch.tensor([[confidence[path] for path in read]]).logit())
        for path, x in zip(contexts[:count], draft, strict=False):
            p, q = after(P_TABLE, path), after(Q[0], path)
            passes = min(1.0, float(p[x] / q[x])) if q[x] > 0 else 0.0
            rest = residual(p, q)
            for token in range(VOCAB):
                spread((*path, token), weight * (1 - passes) * float(rest[token]))
            weight *= passes
        spread(draft[:count], weight)
    return result


@pytest.mark.parametrize("peeks", [False, True])
def test_truncation_is_exact(peeks: bool) -> None:
    """Catches any dependence of a decision on later tokens; a confidence that reads its own token must show."""
    draw, lengths, worst = random.Random(4), set(), 0.0
    for _ in range(20):
        paths = [path for depth in range(DEPTH + 1) for path in itertools.product(range(VOCAB), repeat=depth)]
        confidence = {path: draw.uniform(0.02, 0.98) for path in paths}
        costs = Costs(0.1, Curve((1, 2), (1.0, 1.0 + draw.choice([0.2, 0.4]))))

        def length(certainty: Tensor, costs: Costs = costs) -> int:
            policy = Truncation(DEPTH, trained=True)
            policy._costs[1, HOT, 64] = costs
            lengths.add(found := policy.length(certainty, state_of(1, [False])))
            return found

        worst = max(worst, bias(committed(length, confidence, peeks)))
    assert lengths == {0, 1, 2}
    assert worst > 0.02 if peeks else worst < 1e-6


def state_of(batch: int, finished: list[bool]) -> Any:
    """What a policy reads of a state."""
    target = SimpleNamespace(max_context=64)
    return SimpleNamespace(batch=batch, sampling=HOT, finished=finished, length=9, target=target)


MAKERS: dict[str, Callable[[TargetModel], Any]] = {
    "dflash chain": lambda t: dflash(t, None, "chain", **TOY),
    "dflash tree": lambda t: dflash(t, None, "tree", nodes=9, top_k=3, **TOY),
    "dflash auto": lambda t: cycling(dflash(t, None, "auto", "anchor-first", **TOY)),
    "dspark chain": lambda t: dspark(t, None, "chain", markov_head="rnn", **TOY),
    "dspark tree": lambda t: dspark(t, None, "tree", nodes=9, top_k=3, **TOY),
    "dspark auto": lambda t: cycling(dspark(t, None, "auto", markov_head="gated", **TOY)),
    "dflash2 chain": lambda t: dflash2(t, None, "chain", **TOY, **FEW),
    "dflash2 tree": lambda t: dflash2(t, None, "tree", nodes=9, top_k=3, **TOY, **FEW),
    "dflash2 truncated": lambda t: block_costs(dflash2(t, None, "chain", truncate=True, **TOY, **FEW), 0.12),
    "peagle chain": lambda t: peagle(t, "chain", **TOY),
    "peagle tree": lambda t: peagle(t, "tree", nodes=9, top_k=3, **TOY),
    "peagle auto": lambda t: cycling(peagle(t, "auto", draft_vocab_size=4, **TOY)),
    "dspark truncated": lambda t: block_costs(dspark(t, None, "chain", truncate=True, **TOY), 0.12),
    "dflash truncated": lambda t: block_costs(dflash(t, None, "chain", truncate=True, **TOY), 0.12),
}


def cycling(drafter: Any) -> Any:
    """The drafter, whose drafts change shape every step."""
    drafter.policy = Cycling()
    return drafter


@pytest.mark.parametrize(("name", "warp"), [(name, number % 2) for number, name in enumerate(MAKERS)])
def test_sampled_output_is_the_targets(name: str, warp: int) -> None:
    """Catches a q of another slot, of a slot before the Markov head, or of another temperature; draws of one slot that
    differ from path to path; a chain cut by its own tokens.
    """
    assert deviation(MAKERS[name](toy()), WARPS[warp]) < LIMIT


def test_lengths_by_hand() -> None:
    """Catches a gain that is not cumulative, a cost of the wrong row, a finished row that counts."""
    policy = Truncation(4, trained=True)
    policy._costs[2, HOT, 64] = Costs(0.1, Curve((1, 2), (1.0, 1.2)))
    state = state_of(2, [False, True])
    chances = torch.tensor([[0.9, 0.5, 0.4, 0.9], [0.99, 0.99, 0.99, 0.99]])
    assert policy.length(chances.logit(), state) == 2  # 0.9, 0.45, then 0.18 < 0.2
    state.finished = [False, False]
    assert policy.length(chances.logit(), state) == 4  # their means: 0.95 to 0.56
    found = policy.expected()
    assert found is not None and found.steps == 2
    assert found.tokens == pytest.approx(1 + 0.9 + 0.45 + 1 + 0.945 + 0.71505 + 0.57515 + 0.56130, abs=1e-4)
    assert found.plain_steps == pytest.approx(0.1 + 1.4 + 0.1 + 1.8)
    low = torch.full((2, 4), -8.0)
    for trained in (True, False):
        online = Truncation(4, trained)
        online._costs = policy._costs
        assert [online.length(low, state) for _ in range(EXPLORE)].count(4) == (not trained)


def test_lengths_on_a_bent_curve() -> None:
    """Catches the cost of the row before or after, costs that are not in plain steps, and a pace that stays at 1."""
    policy = Truncation(4, trained=True)
    policy._costs[1, HOT, 64] = Costs(0.2, Curve((1, 2, 4, 5), (2.0, 2.6, 2.6, 4.0)))  # in plain steps: 0.3, 0, 0, 0.7
    state = state_of(1, [False])
    assert policy.length(torch.tensor([[0.5, 0.5, 0.5, 0.9]]).logit(), state) == 3  # 0.5, 0.25 and 0.125; then 0.1125
    found = policy.expected()
    assert found is not None and found[:3] == pytest.approx((1, 1.875, 0.1 + 1.3))
    assert found.choice == "3.0 tokens a draft"
    fast = torch.tensor([[1.0, 1.0, 1.0, 0.9]]).logit().clamp(-50, 50)
    for steps, length in ((1, 4), (300, 3)):  # 0.9 tokens for 0.7 steps, until the average step has 4 tokens in 1.4
        for _ in range(steps):
            last = policy.length(fast, state)
        assert last == length


def test_only_verified_positions_are_learned() -> None:
    """Catches a position behind the last verified one that counts as rejected, or as accepted; and a draft that counts
    though none of it was verified."""
    target = target_of("llama")
    drafter = block_costs(dflash(target, 0.0, "chain", truncate=True))  # all of whose tokens are right
    policy, length, learned = drafter.policy, drafter.policy.length, []
    lengths = itertools.cycle([1, 0, 2])

    def cut(certainty: Tensor, state: Any) -> int:
        length(certainty, state)
        return next(lengths)

    with (
        mock.patch.object(policy, "length", cut),
        mock.patch.object(OnlineAcceptance, "learn", lambda self, *given: learned.append(given)),
    ):
        steps = generate(target, drafter, [prompt(9)], max_new_tokens=24, eos_token_id=[]).trace.steps
    assert [step.accepted for step in steps[:6]] == [step.drafted for step in steps[:6]] == [1, 0, 2, 1, 0, 2]
    assert [(place, right) for place, _, right in learned[:6]] == [(0, True), (0, True), (1, True)] * 2


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
        assert estimate.values([logit])[0] == pytest.approx(1 / (1 + math.exp(1.0 - 0.8 * logit)), abs=0.1)
    assert estimate.values([0.0, 0.0])[1] == pytest.approx(1 / (1 + math.exp(0.2)))
    policy = Truncation(3, trained=False)
    policy._latest = [[0.0, 0.0, 0.0]] * 2
    state: Any = SimpleNamespace(sampling=HOT, finished=[False, True])
    policy.learn(chain_plan(3, torch.device("cpu")), 2, state, Verdict([[0], [0, 1, 2]], [[5], [5, 6, 7]], [2, 2]))
    values, fresh = policy._online.values([0.0] * 3), OnlineAcceptance(3).values([0.0] * 3)
    assert values[0] < fresh[0] and values[1:] == fresh[1:]
    assert float(top_logit(torch.tensor([0.0, math.log(3.0)]))) == pytest.approx(math.log(3.0))
