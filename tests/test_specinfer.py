"""SpecInfer: VerifyStochastic by exact enumeration, and drafts that stay each model's own."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conformance import NO_EOS, each_draft, prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy
from enumeration import Q, accepted, bias, committed, deduplicated, sampled
from rigged import perturbed

from drafters import Sampling, TargetModel, generate
from drafters.drafting.merged_tree import MergedTree, Trials
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.papers.specinfer import SpecInferDrafter, run_trials, verify_stochastic

# The rule, over every draft of a toy vocabulary.

TWO = [Q[2], Q[1]]


def as_it_is(tree: MergedTree) -> MergedTree:
    return tree


def other_models_q(tree: MergedTree) -> MergedTree:
    """Each of two models' trials with the q of the other."""
    assert tree.q is not None
    return replace(tree, q=tree.q.view(2, -1, tree.q.shape[-1]).flip(0).reshape(tree.q.shape))


def whole_p(tree: MergedTree, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each trial against the whole p, as if none had failed before it."""
    with mock.patch("drafters.methods.papers.specinfer.residual", lambda p, q: p):
        return run_trials(tree, p)


@pytest.mark.parametrize("models", [[0], [0, 1], [1, 0], [2, 1], [0, 0], [0, 1, 2]])
def test_committed_tokens_follow_the_target(models: list[int]) -> None:
    """Catches any bias in the next three tokens, in any order of the models: exact to rounding."""
    assert bias(committed([Q[model] for model in models], run_trials)) < 1e-12


@pytest.mark.parametrize(
    ("change", "trials", "tables"),
    [(deduplicated, run_trials, TWO), (other_models_q, run_trials, Q[:2]), (as_it_is, whole_p, TWO)],
)
def test_the_enumeration_sees_wrong_rules(
    change: Callable[..., MergedTree], trials: Trials, tables: list[list[list[float]]]
) -> None:
    """Catches an enumeration that cannot fail. The tempting mistake: what two models proposed is one trial."""
    assert bias(committed(tables, trials, change)) > 0.05


def test_more_models_accept_more() -> None:
    """Catches trials that are listed but never tried. By hand, with p = (0.5, 0.3, 0.2):

    q_1 = (0.2, 0.5, 0.3) passes with sum min(p, q_1) = 0.7 and else leaves p = (1, 0, 0), where q_2 = (0.6, 0.1, 0.3)
    passes with 0.6 and else leaves the same, where q_3 = (0.1, 0.1, 0.8) passes with 0.1.
    """
    chances = [accepted(Q[:n], run_trials) for n in (1, 2, 3)]
    assert chances == pytest.approx([0.7, 0.7 + 0.3 * 0.6, 0.88 + 0.12 * 0.1])


def test_rule_draws_what_the_enumeration_says() -> None:
    """Catches what the enumeration leaves out: the random order, the random numbers, the walk and the bonus."""
    assert sampled(TWO, verify_stochastic, 3000) < 4.0
    assert sampled(TWO, lambda tree, *rest: verify_stochastic(deduplicated(tree), *rest), 3000) > 8.0


def test_models_are_tried_in_random_order() -> None:
    """Catches a fixed order, which is lossless too but not the paper's: the first model would win most trials."""
    q = torch.full((2, 1, 2), 0.5)
    tree = MergedTree.merge(torch.tensor([[0], [1]]), q, frozenset())  # both pass with certainty: the first tried wins
    logits, generator = torch.zeros(1, 3, 2), torch.Generator().manual_seed(0)
    verdicts = [verify_stochastic(tree, logits, torch.ones(1), Sampling(1.0), generator) for _ in range(400)]
    assert 150 < sum(verdict.tokens[0][0] for verdict in verdicts) < 250


# The drafter.


def two(target: TargetModel, gamma: int = 3) -> SpecInferDrafter:
    return SpecInferDrafter.from_options(
        target, draft_models=[perturbed(target, 0.05), perturbed(target, 0.1, seed=3)], gamma=gamma
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_draft_models(temperature: float) -> None:
    """Catches a draft cache that keeps another model's accepted tokens or its own rejected ones: tau falls, unseen."""
    target = target_of("llama")
    drafter = two(target)
    lengths = set()
    models = [speculator.draft_model for speculator in drafter.speculators]

    def checked(state: DecodeState, draft: DraftTree) -> None:
        if draft.size == 0:
            return
        assert isinstance(draft, MergedTree)
        known = state.tokens[0]
        for index, (model, path) in enumerate(zip(models, draft.trie.paths, strict=True)):
            tokens = [draft.trie.tokens[node] for node in path]
            logits = model.model(torch.tensor([known + tokens])).logits[0, len(known) - 1 : -1]
            if temperature == 0:
                assert draft.q is None and tokens == logits.argmax(-1).tolist()
            else:
                assert draft.q is not None
                q = draft.q[0].view(2, len(path), -1)[index]
                expected = Sampling(temperature, 30, 0.95).probabilities(logits)
                torch.testing.assert_close(q, expected, atol=1e-4, rtol=1e-3)
                assert bool((q.gather(1, torch.tensor(tokens)[:, None]) > 0).all())

    def observed(state: DecodeState, draft: MergedTree, output: object, verdict: object) -> None:
        observe(state, draft, output, verdict)
        lengths.add(tuple(drafter._known - speculator._cache.lengths[0] for speculator in drafter.speculators))

    observe = drafter.observe
    with each_draft(drafter, checked), mock.patch.object(drafter, "observe", observed):
        for seed in range(3):
            options = {"max_new_tokens": 20, "eos_token_id": NO_EOS, "top_k": 30, "top_p": 0.95, "seed": seed}
            generate(target, drafter, [prompt(8, seed)], temperature=temperature, **options)
    assert any(a > b for a, b in lengths) and any(a < b for a, b in lengths), "each model must lead at times"


def test_output_is_distributed_as_the_targets() -> None:
    """Catches q without its warps, or of another model, where the whole loop hands them over."""
    drafter = SpecInferDrafter.from_options(toy(), draft_models=[toy(1, 1), toy(3, 1)], gamma=2)
    assert deviation(drafter, WARPS[1], 1_200) < LIMIT
