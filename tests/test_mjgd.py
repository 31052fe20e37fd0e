"""MJGD: the likeliest next K tokens against brute force, its rule in hand-worked cases, and K = 1 as plain decoding."""

import itertools
import math

import conformance
import pytest
import torch
from likelihood import excess
from tiny import build

from drafters import Sampling, TargetModel, generate
from drafters.drafting.beam_search import Paths
from drafters.methods.papers.mjgd import JointMaximum, MJGDDrafter, side_by_side


class Plain(MJGDDrafter):
    """K = 1, which is lossless: the suite then compares with plain decoding."""

    lossless = True


class Suite(conformance.Conformance):
    """The suite, but for steps that take several target forwards each."""

    def test_trace_and_acceptance(self) -> None:
        """Catches target forwards of the search that are not counted, which would pass for a speedup."""
        target = self.target()
        trace = self.run(target, conformance.prompt(9), max_new_tokens=24).trace
        assert [(step.committed, step.forwards) for step in trace.steps] == [(3, 3)] * 7 + [(2, 2)]
        assert trace.tau == 1.0 and trace.forwards == 23
        assert all(step.accepted == step.depth == step.committed - 1 for step in trace.steps)


class TestSearch(Suite):
    make = staticmethod(lambda target: MJGDDrafter.from_options(target, k=3, beams=4))
    build = staticmethod(build)
    accepts, families, longest_draft, remembers = None, ("llama", "mistral-sliding", "mixtral"), 2, False


TestOneToken = conformance.suite(lambda target: Plain.from_options(target, k=1), longest_draft=1)


def toy(seed: int = 0) -> TargetModel:
    """A random model of six tokens."""
    no_ends = {"eos_token_id": None, "pad_token_id": None}
    return TargetModel(build("llama", seed=seed, vocab_size=6, num_hidden_layers=2, initializer_range=0.2, **no_ends))


def log_likelihoods(model: TargetModel, ids: list[int], tails: list[list[int]]) -> torch.Tensor:
    """``[n, K]`` log-probability of each token of equally long ``tails`` after ``ids`` and those before."""
    known, tokens = torch.tensor([ids]).expand(len(tails), -1), torch.tensor(tails)
    logits = model.model(torch.cat([known, tokens], 1)).logits[:, len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]


def likeliest(model: TargetModel, ids: list[int], k: int, eos: int = -1) -> list[int]:
    """The best of all 6^K continuations; those that end count as far as their EOS."""
    tails = [list(tail) for tail in itertools.product(range(6), repeat=k)]
    steps = log_likelihoods(model, ids, tails)
    ends = (torch.tensor(tails) == eos).long()
    scores = steps.masked_fill(ends.cumsum(1) - ends > 0, 0.0).sum(1)
    best = tails[int(scores.argmax())]
    return best[: best.index(eos) + 1] if eos in best else best


def decode(model: TargetModel, ids: list[int], count: int, eos: list[int], **options: int) -> list[int]:
    """The ``count`` tokens after ``ids`` and the first new token, which plain prefilling gives."""
    result = generate(
        model, MJGDDrafter.from_options(model, **options), [ids], max_new_tokens=count + 1, eos_token_id=eos
    )
    return result.tokens[0, 1 : result.lengths[0]].tolist()


# The decoding.


@pytest.mark.parametrize("k", [2, 3])
def test_the_likeliest_k_tokens(k: int) -> None:
    """Catches a search that is greedy in disguise, and a last token chosen apart: every one of 6^K is compared."""
    differs = 0
    for seed, first in itertools.product(range(2), range(6)):
        model = toy(seed)
        ids = [first, 2, *conformance.plain_greedy(model, [first, 2], 1)]
        best = likeliest(model, ids, k)
        assert decode(model, [first, 2], k, [], k=k, beams=6 ** (k - 1)) == best
        differs += best != conformance.plain_greedy(model, ids, k)
    assert differs > 0


def test_ended_hypotheses_stay() -> None:
    """Catches a finished hypothesis that is charged for tokens after its EOS, or one that goes on past it."""
    lengths = set()
    for seed, eos in itertools.product(range(3), range(6)):
        model = toy(seed)
        ids = [3, *conformance.plain_greedy(model, [3], 1)]
        best = likeliest(model, ids, 3, eos)
        if ids[-1] != eos:
            assert decode(model, [3], 3, [eos], k=3, beams=36) == best
            lengths.add(len(best))
    assert lengths == {1, 2, 3}


# The rule.


def verdict(
    paths: list[list[tuple[int, float]]], after: list[tuple[int, float]], eos: tuple[int, ...] = ()
) -> tuple[list[int], list[int]]:
    """Rows and tokens for hypotheses of (token, p) and the likeliest token after each, of probability p.

    Every other row's likeliest token is 59, of probability 1.
    """
    tokens = torch.tensor([[token for token, _ in path] for path in paths])
    log_p = torch.tensor([[p for _, p in path] for path in paths]).log()
    draft = side_by_side(Paths(tokens, log_p, tokens), frozenset(eos))
    length = tokens.shape[1]
    p = torch.zeros(1, 1 + draft.size, 60)
    p[0, :, 59] = 1.0
    for beam, (token, known) in enumerate(after):
        p[0, (beam + 1) * length, 59] = 0.0
        p[0, (beam + 1) * length, 20:40] = (1 - known) / 20
        p[0, (beam + 1) * length, token] = known
    found = JointMaximum(frozenset(eos))(draft, p.log(), draft.ancestors(), Sampling(), None)
    return found.rows[0], found.tokens[0]


def test_the_last_token_may_turn_the_order() -> None:
    """Catches the best beginning taken for the best whole: 0.5 * 0.8 * 0.3 = 0.12 < 0.4 * 0.5 * 0.9 = 0.18."""
    assert verdict([[(1, 0.5), (2, 0.8)], [(3, 0.4), (4, 0.5)]], [(5, 0.3), (6, 0.9)]) == ([0, 3, 4], [3, 4, 6])
    assert verdict([[(1, 0.5), (2, 0.8)], [(3, 0.4), (4, 0.5)]], [(5, 0.5), (6, 0.9)]) == ([0, 1, 2], [1, 2, 5])


def test_an_ended_hypothesis_needs_no_last_token() -> None:
    """Catches an EOS charged for a token after it: 0.2 is more than 0.4 * 0.5 * 0.9 = 0.18."""
    ended, open_ = [(1, 0.2), (1, 1.0)], [(3, 0.4), (4, 0.5)]
    rows, tokens = verdict([ended, open_], [(5, 0.1), (6, 0.9)], eos=(1,))
    assert rows == [0, 1] and tokens[0] == 1
    assert verdict([[(2, 0.5), (1, 0.4)], open_], [(5, 0.1), (6, 0.9)], eos=(1,))[1][:2] == [2, 1]
    assert verdict([[(1, 0.17), (1, 1.0)], open_], [(5, 0.1), (6, 0.9)], eos=(1,))[1] == [3, 4, 6]


# Sampling.


def test_sampled_last_tokens() -> None:
    """Catches last tokens drawn once for all, or the likeliest ones: all 4^4 outcomes are enumerated."""
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(4, generator=generator).softmax(0)
    second = (torch.randn(4, 4, generator=generator) * 1.5).softmax(-1)
    expected = torch.zeros(4, 4)
    for drawn in itertools.product(range(4), repeat=4):
        chance = math.prod(float(second[beam, token]) for beam, token in enumerate(drawn))
        best = max(range(4), key=lambda beam: float(first[beam] * second[beam, drawn[beam]]))  # noqa: B023
        expected[best, drawn[best]] += chance
    draft = side_by_side(Paths(torch.arange(4)[:, None], first.log()[:, None], torch.arange(4)[:, None]), frozenset())
    count = 40_000
    draft.tokens, draft.parents = draft.tokens.expand(count, -1), draft.parents.expand(count, -1)
    assert draft.extra.log_q is not None
    draft.extra.log_q = draft.extra.log_q.expand(count, -1)
    logits = torch.cat([torch.zeros(1, 4), second.log()])[None].expand(count, -1, -1)
    found = JointMaximum()(draft, logits, draft.ancestors(), Sampling(1.0), generator)
    seen = torch.zeros(4, 4)
    for tokens in found.tokens:
        seen[tokens[0], tokens[1]] += 1 / count
    assert float((seen - expected).abs().sum()) / 2 < 0.01


def test_one_token_or_one_beam_is_plain_sampling() -> None:
    """Catches likelihood that leaks into a choice where there is none; with several beams it must show (the power)."""
    model = TargetModel(build("llama", vocab_size=6, num_hidden_layers=1, initializer_range=0.2, eos_token_id=None))
    assert abs(excess(model, MJGDDrafter.from_options(model, k=1), [3, 1])) < 3
    assert abs(excess(model, MJGDDrafter.from_options(model, k=3, beams=1), [3, 1])) < 3
    assert excess(model, MJGDDrafter.from_options(model, k=2, beams=2), [3, 1]) > 5
