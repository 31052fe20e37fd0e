"""BiLD: its two policies in hand-worked cases, and under the conformance suite."""

import conformance
import pytest
import torch
from rigged import perturbed

from drafters import Sampling, generate
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.papers.bild import BiLDDrafter, Rollback

TestItself = conformance.brief(
    lambda target: BiLDDrafter.from_options(target, draft_model=target, gamma=4, fallback=0.0, rollback=50.0),
    accepts="all",
    families=("llama", "mistral-sliding"),
    longest_draft=4,
)
TestNear = conformance.suite(
    lambda target: BiLDDrafter.from_options(
        target, draft_model=perturbed(target, 0.05), gamma=5, fallback=0.1, rollback=1.5
    ),
    accepts="some",
    families=("llama", "mixtral"),
    longest_draft=5,
)


def logits_after(p: list[float]) -> torch.Tensor:
    """``[1, n + 1, 60]`` after the draft 0, 1, 2, ...: token i has p_i, and 30 + i the rest of the mass."""
    after = torch.zeros(1, len(p) + 1, 60)
    for i, known in enumerate([*p, 0.0]):
        after[0, i, i], after[0, i, 30 + i] = known, 1 - known
    return after.log()


def verdict(p: list[float], rollback: float, sampling: Sampling | None = None, seed: int = 0) -> list[int]:
    """Committed tokens for the draft 0, 1, 2, ..., which the target gives ``logits_after(p)``."""
    draft = DraftTree.chain(torch.arange(len(p))[None])
    generator = torch.Generator().manual_seed(seed)
    found = Rollback(rollback)(draft, logits_after(p), draft.ancestors(), sampling or Sampling(), generator)
    assert found.rows[0] == list(range(len(found.tokens[0])))
    return found.tokens[0]


@pytest.mark.parametrize(
    ("p", "rollback", "sampling", "tokens"),
    [
        # -log 0.2 = 1.61 and -log 0.1 = 2.30: two tokens stay, though the fourth would pass again.
        ([0.9, 0.2, 0.1, 0.9], 2.0, Sampling(), [0, 1, 32]),
        ([0.9, 0.2, 0.1, 0.9], 1.0, Sampling(), [0, 31]),
        ([0.9, 0.2, 0.1, 0.9], 3.0, Sampling(), [0, 1, 2, 3, 34]),
        ([0.05, 0.9], 2.0, Sampling(), [30]),
        ([0.5], float(-torch.tensor(0.5).log()), Sampling(), [0, 31]),  # on the threshold
        ([0.3, 0.3], 2.0, Sampling(1.0, top_k=1), [0, 1, 32]),  # the likelihood is the target's own, not warped
        ([0.3, 0.3], 2.0, Sampling(0.01), [0, 1, 32]),
    ],
)
def test_rolls_back_at_the_first_unlikely_token(
    p: list[float], rollback: float, sampling: Sampling, tokens: list[int]
) -> None:
    """Catches tokens accepted past a rejected one, and a threshold taken of p, of a warped p, or exclusively."""
    assert verdict(p, rollback, sampling) == tokens


def test_bonus_is_sampled() -> None:
    """Catches a rolled-back position filled greedily where sampling was asked for."""
    seen = {verdict([0.05], 2.0, Sampling(5.0), seed)[0] for seed in range(40)}
    assert seen == {0, 30}


def recorded(drafter: BiLDDrafter, **options: object) -> list[tuple[list[int], list[int], int]]:
    """Every draft of a generation: the tokens before it, its own, and the most that it might have had."""
    drafts = []
    go = drafter.propose

    def record(state: DecodeState) -> DraftTree:
        limit, tree = min(drafter.gamma, state.room() - 1), go(state)
        drafts.append((list(state.tokens[0]), tree.tokens[0].tolist(), limit))
        return tree

    drafter.propose = record  # type: ignore[method-assign]
    ids = conformance.prompt(9)
    generate(drafter.target, drafter, [ids], max_new_tokens=40, eos_token_id=[], **options)  # type: ignore[arg-type]
    return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_falls_back_before_the_first_uncertain_token(temperature: float) -> None:
    """Catches the uncertain token drafted all the same, a warped confidence, and a draft cache that drifts unseen."""
    target = conformance.target_of("llama")
    draft_model, tau = perturbed(target, 0.05), 0.2
    drafts = recorded(
        BiLDDrafter.from_options(target, draft_model=draft_model, gamma=3, fallback=tau),
        temperature=temperature,
        top_k=5,
    )
    ranks: list[int] = []
    for known, tokens, limit in drafts:
        logits = draft_model.model(torch.tensor([known + tokens])).logits[0, len(known) - 1 :]
        confident = (logits.softmax(-1).amax(-1) >= tau).tolist()
        assert all(confident[: len(tokens)])
        assert len(tokens) == limit or not confident[len(tokens)]
        ranks += [int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=False)]
    assert 0 < max(ranks) < 5 if temperature else max(ranks) == 0
    lengths = {len(tokens) for _, tokens, limit in drafts if limit == 3}
    assert {0, 3} <= lengths and len(lengths) > 2, "the rig must stop early and late"
