"""SpecInfer: VerifyStochastic by exact enumeration, and drafts that stay each model's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conformance import NO_EOS, plain_greedy, prompt, rows_of, target_of
from distribution import LIMIT, WARPS, deviation, toy
from enumeration import Q, accepted, bias, committed, deduplicated, sampled
from rigged import perturbed
from transformers import PreTrainedModel

from drafters import Sampling, TargetModel, generate, make_drafter
from drafters.drafting.merged_tree import MergedTree, Trials
from drafters.loop.acceptance import Rule
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.cascade import CascadeDrafter
from drafters.methods.specinfer import SpecInferDrafter, SpecInferOptions, run_trials, verify_stochastic
from drafters.methods.speculative import SpeculativeDrafter

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
    with mock.patch("drafters.methods.specinfer.residual", lambda p, q: p):
        return run_trials(tree, p)


@pytest.mark.parametrize("models", [[0], [0, 1], [1, 0], [2, 1], [0, 0], [0, 1, 2]])
def test_committed_tokens_follow_the_target(models: list[int]) -> None:
    """Catches any bias in the next three tokens, in whatever order the models are tried: exact to rounding."""
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


def test_worked_example() -> None:
    """Catches a trial against another model's q. p = (0.2, 0.8), q_1 = (0.6, 0.4), q_2 = (0.5, 0.5); both propose 0.

    Trial 1 passes with 0.2/0.6 = 1/3; else p <- norm(max(0, (-0.4, 0.4))) = (0, 1). Trial 2 then passes with 0/0.5 = 0;
    else p <- norm(max(0, (-0.5, 0.5))) = (0, 1), the bonus. In the other order the first passes with 0.2/0.5 = 0.4.
    """
    q = torch.tensor([[[0.6, 0.4]], [[0.5, 0.5]]])
    for order, chance in (([0, 1], 1 / 3), ([1, 0], 0.4)):
        tree = MergedTree.merge(torch.tensor([[0], [0]]), q[order], frozenset())
        chances, left = run_trials(tree, torch.tensor([[0.2, 0.8]]))
        torch.testing.assert_close(chances, torch.tensor([[chance, 0.0]]))
        torch.testing.assert_close(left, torch.tensor([[0.0, 1.0]]))


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
    propose, lengths = drafter.propose, set()
    models = [speculator.draft_model for speculator in drafter.speculators]

    def checked(state: DecodeState) -> DraftTree:
        draft = propose(state)
        if draft.size == 0:
            return draft
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
        return draft

    def observed(state: DecodeState, draft: MergedTree, output: object, verdict: object) -> None:
        observe(state, draft, output, verdict)
        lengths.add(tuple(drafter._known - speculator._cache.lengths[0] for speculator in drafter.speculators))

    observe = drafter.observe
    with mock.patch.object(drafter, "propose", checked), mock.patch.object(drafter, "observe", observed):
        for seed in range(3):
            options = {"max_new_tokens": 20, "eos_token_id": NO_EOS, "top_k": 30, "top_p": 0.95, "seed": seed}
            generate(target, drafter, [prompt(8, seed)], temperature=temperature, **options)
    assert any(a > b for a, b in lengths) and any(a < b for a, b in lengths), "each model must lead at times"


def test_one_draft_model_is_speculative_decoding() -> None:
    """Catches a tree that drafts, accepts or commits otherwise than the chain it is."""
    target = target_of("llama")
    draft_model = perturbed(target, 0.05)
    for seed in range(3):
        runs = [
            generate(target, drafter, [prompt(9, seed)], max_new_tokens=30, eos_token_id=NO_EOS)
            for drafter in (
                SpecInferDrafter.from_options(target, draft_models=[draft_model]),
                SpeculativeDrafter.from_options(target, draft_model=draft_model),
            )
        ]
        assert runs[0].tokens.tolist() == runs[1].tokens.tolist()
        assert runs[0].trace.steps == runs[1].trace.steps


def test_a_second_model_helps() -> None:
    """Catches a second sequence that is drafted and verified but can never be accepted."""
    target = target_of("llama")
    models = [perturbed(target, 0.1), perturbed(target, 0.1, seed=3)]
    for temperature in (0.0, 1.0):
        taus = []
        for some in (models[:1], models):
            drafter = SpecInferDrafter.from_options(target, draft_models=some, gamma=3)
            options = {"max_new_tokens": 30, "eos_token_id": NO_EOS, "temperature": temperature}
            traces = [generate(target, drafter, [prompt(9, s)], seed=s, **options).trace for s in range(4)]
            taus.append(sum(t.decoded_tokens for t in traces) / sum(t.forwards for t in traces))
        assert taus[1] > taus[0] + 0.05


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches q without its warps, or of another model, where the whole loop hands them over."""
    drafter = SpecInferDrafter.from_options(toy(), draft_models=[toy(1, 1), toy(3, 1)], gamma=2)
    assert deviation(drafter, WARPS[warp], (2_000, 1_200)[warp]) < LIMIT


def other_q(draft, *rest):  # noqa: ANN001, ANN002, ANN201
    return verify_stochastic(other_models_q(draft) if draft.size else draft, *rest)


def against_whole_p(draft, *rest):  # noqa: ANN001, ANN002, ANN201
    with mock.patch("drafters.methods.specinfer.run_trials", whole_p):
        return verify_stochastic(draft, *rest)


@pytest.mark.parametrize(("wrong", "tokens"), [(other_q, 600), (against_whole_p, 2_000)])
def test_the_measurement_sees_wrong_rules(wrong: Rule, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a distribution test that cannot fail."""
    drafter = SpecInferDrafter.from_options(toy(), draft_models=[toy(1, 1), toy(3, 1)], gamma=2)
    monkeypatch.setattr(drafter, "rule", lambda sampling: wrong)
    assert deviation(drafter, WARPS[0], tokens) > 5.0


def test_inside_a_cascade() -> None:
    """Catches draft caches that do not follow when tokens are taken back."""
    target = target_of("llama")
    draft_model = perturbed(target, 0.05)
    drafter = CascadeDrafter.from_options(target, draft_model=draft_model, inner=two(draft_model), gamma=4)
    result = generate(target, drafter, [prompt(9)], max_new_tokens=24, eos_token_id=NO_EOS)
    assert rows_of(result)[0] == plain_greedy(target, prompt(9), 24)
    assert any(step.accepted > 1 for step in result.trace.steps)


def test_options(tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Catches draft models that are copied or refused by the options, unchecked ones, and a context of the longest."""
    target = target_of("llama")
    loaded = perturbed(target, 0.1)
    path = str(tiny_checkpoint("llama"))
    drafter = make_drafter("specinfer", target, draft_models=[loaded, path], gamma=2)
    assert isinstance(drafter, SpecInferDrafter) and drafter.max_draft == 4
    assert drafter.speculators[0].draft_model is loaded and drafter.speculators[1].draft_model.name == path
    assert SpecInferOptions(draft_models=[loaded]).model_dump()["draft_models"][0] is loaded
    with pytest.raises(ValueError, match="draft_models"):
        make_drafter("specinfer", target, draft_models=[])
    with pytest.raises(ValueError, match="gamma"):
        make_drafter("specinfer", target, draft_models=[loaded], gamma=0)
    with pytest.raises(ValueError, match="101 tokens.*97"):
        SpecInferDrafter.from_options(target, draft_models=[loaded, TargetModel(tiny_model("llama", vocab_size=101))])
    short = TargetModel(tiny_model("llama", max_position_embeddings=64))
    assert SpecInferDrafter.from_options(target, draft_models=[loaded, short]).max_context == 64
