"""MJSD: acceptance by joint likelihood in hand-worked cases, and its beam search against brute force."""

import itertools
import math

import conformance
import pytest
import torch
from rigged import perturbed
from tiny import build

from drafters import Sampling, TargetModel, generate, make_drafter
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.mjsd import JointLikelihood, MJSDDrafter

TestItself = conformance.suite(
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


def toy(seed: int = 0) -> TargetModel:
    """A random model of six tokens."""
    return TargetModel(
        build("llama", seed=seed, vocab_size=6, num_hidden_layers=2, initializer_range=0.2, eos_token_id=None)
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
    """Committed tokens for the draft 0, 1, 2, ... of probabilities p and q, each given those before.

    The target gives the rest of its mass after i draft tokens to token 30 + i.
    """
    n = len(p)
    after = torch.zeros(1, n + 1, 60)
    for i, known in enumerate([*p, 0.0]):
        after[0, i, i], after[0, i, 30 + i] = known, 1 - known
    draft = DraftTree.chain(torch.arange(n)[None], valid=None if valid is None else torch.tensor([valid]))
    draft.extra.log_q = torch.tensor([q]).log()
    found = JointLikelihood(threshold, warped)(draft, after.log(), draft.ancestors(), sampling or Sampling())
    assert found.rows[0] == list(range(len(found.tokens[0])))
    return found.tokens[0]


def test_longest_prefix_past_a_failing_one() -> None:
    """Catches stopping at the first failing prefix, as token-wise rules do (Figure 2).

    p/q of the prefixes: 0.4/0.8 = 0.5; 0.5 * 0.04/0.8 = 0.025 fails 0.1; 0.025 * 0.9/0.1 = 0.225 passes again;
    0.225 * 0.1/0.4 = 0.056 fails. Three tokens are accepted, then the target's argmax after them.
    """
    assert verdict([0.4, 0.04, 0.9, 0.1], [0.8, 0.8, 0.1, 0.4], 0.1) == [0, 1, 2, 33]


def test_ratio_is_clipped_only_for_the_comparison() -> None:
    """Catches min(1, .) carried from prefix to prefix: 0.8/0.1 = 8, then 8 * 0.02/0.8 = 0.2 > 0.1 (clipped: 0.025)."""
    assert verdict([0.8, 0.02], [0.1, 0.8], 0.1) == [0, 1, 32]


def test_none_and_all() -> None:
    """Catches a bonus from the wrong row, and the misprint of Algorithm 1, which counts by token ids."""
    assert verdict([0.01, 0.1], [0.9, 0.9], 0.1) == [30]
    assert verdict([0.3, 0.3], [0.5, 0.5], 0.1) == [0, 1, 32]


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


def test_extreme_thresholds() -> None:
    """Catches log(0) and an inclusive comparison: 0 accepts whatever is possible, 1 nothing (Figure 4)."""
    assert verdict([0.001, 0.001], [0.9, 0.9], 0.0) == [0, 1, 32]
    assert verdict([0.9, 0.9], [0.1, 0.1], 1.0) == [0]  # the bonus is the target's argmax, here the draft's token


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
    return DecodeState(
        target=target,
        cache=target.new_cache(1, 32),
        tokens=[list(ids)],
        prompt_lengths=[len(ids)],
        sampling=Sampling(temperature, **warps),  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(0),
        max_new_tokens=20,
        eos=frozenset(eos),
        finished=[False],
    )


def log_likelihood(model: TargetModel, ids: list[int], tail: list[int], warp: Sampling | None = None) -> torch.Tensor:
    """``[len(tail)]`` log-probability of each token of ``tail`` after ``ids`` and those before; warped or as it is."""
    logits = model.model(torch.tensor([ids + tail])).logits[0, len(ids) - 1 : -1]
    log_p = logits.log_softmax(-1) if warp is None else warp.probabilities(logits).log()
    return log_p[torch.arange(len(tail)), torch.tensor(tail)]


def likeliest(model: TargetModel, ids: list[int], length: int) -> list[int]:
    """Of all texts of ``length`` tokens."""
    every = [list(tail) for tail in itertools.product(range(6), repeat=length)]
    return max(every, key=lambda tail: float(log_likelihood(model, ids, tail).sum()))


@torch.inference_mode()
def propose(drafter: MJSDDrafter, state: DecodeState) -> DraftTree:
    drafter.begin(state, None)  # type: ignore[arg-type]
    return drafter.propose(state)


def test_wide_beams_find_the_joint_maximum() -> None:
    """Catches a search that is greedy in disguise: with every hypothesis kept it must find the likeliest sequence."""
    model = toy(3)
    differs = 0
    for first in range(6):
        ids = [first, 2]
        best = likeliest(model, ids, 2)
        drafter = MJSDDrafter.from_options(model, draft_model=model, gamma=2, beams=6)
        assert propose(drafter, state_of(model, ids)).tokens[0].tolist() == best
        differs += best != conformance.plain_greedy(model, ids, 2)
    assert differs > 0


def test_sampled_beams() -> None:
    """Catches sampling that ignores the run's warping, the seed or the likelihood: top-k 1 leaves the greedy
    sequence."""
    model, ids = toy(), [3, 1]
    state = state_of(model, ids, temperature=1.0, top_k=1)
    greedy = conformance.plain_greedy(model, ids, 3)
    assert (
        propose(MJSDDrafter.from_options(model, draft_model=model, gamma=3, beams=4), state).tokens[0].tolist()
        == greedy
    )
    drafter = MJSDDrafter.from_options(model, draft_model=model, gamma=3, beams=2)
    state = state_of(model, ids, temperature=3.0)
    seen = {tuple(propose(drafter, state).tokens[0].tolist()) for _ in range(20)}
    assert len(seen) > 1
    narrow = MJSDDrafter.from_options(model, draft_model=model, gamma=1, beams=1)
    first_two = model.model(torch.tensor([ids])).logits[0, -1].topk(2).indices.tolist()
    state = state_of(model, ids, temperature=100.0, top_k=2)
    assert {propose(narrow, state).tokens[0].tolist()[0] for _ in range(40)} == set(first_two)
    every = MJSDDrafter.from_options(model, draft_model=model, gamma=2, beams=6)  # all tokens drawn: nothing is random
    found = propose(every, state_of(model, ids, temperature=1.0)).tokens[0].tolist()
    assert found == likeliest(model, ids, 2)


WARP = Sampling(2.0, top_k=5, top_p=0.9)


@pytest.mark.parametrize("likelihood", ["own", "warped"])
def test_likelihoods_of_a_sampled_run(likelihood: str) -> None:
    """Catches p or q of the other kind, in the beams or in the ratio: both by whole forwards of the stock models.

    With ``own`` the run's temperature, top-k and top-p only choose which tokens are drawn; with ``warped`` they hold
    for both sides of the ratio. The pair is one in which the two kinds decide differently.
    """
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


def test_ended_beams_stay() -> None:
    """Catches a finished hypothesis that is extended past EOS, or that loses by being charged for tokens it lacks."""
    model, ids = toy(), [3, 1]
    first = conformance.plain_greedy(model, ids, 1)[0]
    draft = propose(
        MJSDDrafter.from_options(model, draft_model=model, gamma=3, beams=6), state_of(model, ids, eos=(first,))
    )
    every = [[first], *([a, b, c] for a, b, c in itertools.product(range(6), repeat=3) if a != first)]
    every = [tail[: tail.index(first) + 1] if first in tail else tail for tail in every]
    best = max(every, key=lambda tail: float(log_likelihood(model, ids, tail).sum()))
    assert draft.valid is not None and draft.valid[0].sum() == len(best)
    assert draft.tokens[0].tolist()[: len(best)] == best
    assert draft.extra.log_q[0, len(best) :].eq(0).all()


def test_draft_cache_follows_the_text() -> None:
    """Catches rows of a beam that was not chosen kept in the draft model's cache: later drafts would drift unseen."""
    target = conformance.target_of("llama")
    draft_model = perturbed(target, 0.05)
    drafter = MJSDDrafter.from_options(target, draft_model=draft_model, gamma=3, beams=3)
    drafts = []
    go = drafter.propose

    def record(state: DecodeState) -> DraftTree:
        tree = go(state)
        drafts.append((list(state.tokens[0]), tree))
        return tree

    drafter.propose = record  # type: ignore[method-assign]
    trace = generate(target, drafter, [conformance.prompt(9)], max_new_tokens=24, eos_token_id=[]).trace
    for ids, tree in drafts:
        if tree.size:
            wanted = log_likelihood(draft_model, ids, tree.tokens[0].tolist())
            torch.testing.assert_close(tree.log_q[0], wanted, atol=1e-3, rtol=1e-3)
    assert {step.accepted for step in trace.steps} >= {0, 3}


def test_threshold_one_is_greedy() -> None:
    """Catches anything but the target's own choices when every draft is rejected (section 5.2.2)."""
    target = conformance.target_of("llama")
    ids = conformance.prompt(9)
    result = generate(
        target,
        MJSDDrafter.from_options(target, draft_model=target, threshold=1.0),
        [ids],
        max_new_tokens=12,
        eos_token_id=[],
    )
    assert result.tokens[0].tolist() == conformance.plain_greedy(target, ids, 12) and result.trace.tau == 1.0
    accepting = MJSDDrafter.from_options(target, draft_model=perturbed(target, 1.0), threshold=0.0, beams=2)
    steps = generate(target, accepting, [ids], max_new_tokens=21, eos_token_id=[]).trace.steps
    assert all(step.accepted == step.depth for step in steps)


def test_bad_options() -> None:
    """Catches thresholds and sizes out of range, which would silently accept everything or fail while decoding."""
    target = conformance.target_of("llama")
    for wrong in ({"threshold": 1.5}, {"gamma": 0}, {"beams": 0}, {"likelihood": "q"}, {"treshold": 0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make_drafter("mjsd", target, draft_model="x", **wrong)
    assert not MJSDDrafter.lossless
    assert math.isinf(JointLikelihood(0.0).log_threshold)
