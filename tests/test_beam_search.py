"""Beam search: what extends a hypothesis, and all beams against a search by whole texts."""

import random

import pytest
import torch
from test_mjgd import log_likelihoods, toy
from test_mjsd import state_of

from drafters import Sampling
from drafters.drafting.beam_search import _candidates, beam_search, is_end, trace_back, until_end
from drafters.methods.papers.mjsd import MJSDDrafter

LOGITS = torch.tensor([2.0, 1.5, 1.4, 1.0, 0.0, -1.0, -3.0])


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, 4), Sampling(1.5, 0, 0.8), Sampling(0.8, 5, 0.85)])
def test_tokens_are_drawn_from_the_warped_distribution(sampling: Sampling) -> None:
    """Catches top-k taken before the temperature's cut, ids of the pool taken for tokens, and unwarped draws."""
    count, generator = 40_000, torch.Generator().manual_seed(0)
    shuffled = LOGITS[[3, 6, 0, 4, 2, 5, 1]]
    step, tokens = _candidates(shuffled.expand(count, -1), 2, sampling, generator)
    p = sampling.probabilities(shuffled)
    expected = p[:, None] * p / (1 - p[:, None])
    expected.fill_diagonal_(0.0)
    seen = torch.bincount(tokens[:, 0] * 7 + tokens[:, 1], minlength=49).view(7, 7) / count
    assert float((seen - expected).abs().sum()) / 2 < 0.02
    torch.testing.assert_close(step, shuffled.log_softmax(-1)[tokens])


def test_beams_equal_a_search_by_whole_texts() -> None:
    """Catches rows that see another beam's ancestors, wrong positions, scores that lose their parent's; and a
    hypothesis that goes on behind its EOS, takes several places among the beams, is charged for what it lacks or ends
    at one of several EOS only."""
    rng, model, ended = random.Random(0), toy(), 0
    for _ in range(40):
        ids = [rng.choice([0, 1, 3, 4, 5]), rng.randrange(6)]  # 2 embeds as 0: behind nothing else all tokens tie
        eos, length, width = frozenset(rng.sample(range(6), rng.randrange(4))), rng.randint(2, 4), rng.randint(1, 6)
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(length):
            longer = [[*tail, token] for _, tail in beams if not eos & set(tail) for token in range(6)]
            scores = log_likelihoods(model, ids, longer).sum(1).tolist() if longer else []
            stay = [(score, [*tail, tail[-1]]) for score, tail in beams if eos & set(tail)]
            beams = sorted([*stay, *zip(scores, longer, strict=True)], reverse=True)[:width]
        drafter, state = MJSDDrafter.from_options(model, draft_model=model, gamma=4, beams=width), state_of(model, ids)
        with torch.inference_mode():
            drafter.begin(state, None)  # type: ignore[arg-type]
            models, features = (model, drafter.lm_head, drafter._cache), drafter._catch_up(state)
            levels = beam_search(*models, features, length, width, Sampling(), eos)
        found = trace_back(levels, torch.arange(len(levels[-1].tokens)))
        assert found.tokens.tolist() == [tail for _, tail in beams]
        expected = torch.tensor([score for score, _ in beams])
        torch.testing.assert_close(found.log_p.sum(1), expected, atol=1e-4, rtol=1e-4)
        ended += sum(bool(eos & set(tail)) for _, tail in beams)
    assert ended > 20


def test_exhausted_support() -> None:
    """Catches tokens of probability zero drawn where fewer are left than beams: they must lose against everything."""
    step, tokens = _candidates(LOGITS[None], 4, Sampling(1.0, 0, 0.6), torch.Generator().manual_seed(0))
    allowed = Sampling(1.0, 0, 0.6).probabilities(LOGITS) > 0
    assert step.isfinite().tolist() == allowed[tokens].tolist() and 1 <= int(allowed.sum()) < 4
    assert _candidates(LOGITS[None], 4, Sampling(1.0, 3), torch.Generator().manual_seed(0))[1].shape == (1, 3)


def test_ends() -> None:
    """Catches padding that counts, an EOS that does not, and all but one of several EOS overlooked."""
    tokens = torch.tensor([[5, 1, 1, 1], [5, 2, 2, 2], [1, 1, 1, 1], [5, 6, 7, 8]])
    assert is_end(tokens, frozenset([1, 2])).tolist()[1] == [False, True, True, True]
    valid = until_end(tokens, frozenset([1, 2]))
    assert valid is not None and valid.sum(1).tolist() == [2, 2, 1, 4]
    assert until_end(tokens, frozenset()) is None
