"""train/dspark.py: what it adds to DFlash's training."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from block_reference import markov_bias
from test_train_dflash import BLOCK, check_loss, own_text
from torch import Tensor

from drafters import TargetModel
from train.core import losses
from train.core.losses import Pairs, TextTokens, divergence_sum
from train.preflight.dry_run import dry_run
from train.run.files import read_metrics


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    more = BLOCK | {"tap_layers": [tiny_run.TAP], "markov_rank": 8}
    return tiny_run.settings(target.name, features, tmp_path / "run", **more)


@pytest.mark.parametrize("tokens_only", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [3, 64])
def test_corrected_logits_equal_autograd(tokens_only: bool, weighted: bool, chunk: int) -> None:
    """Catches a correction in one chunk only, a gradient of the Markov head without the rows' weights or the factor of
    the loss, a term of tokens outside of the vocabulary, an overlap of other distributions."""
    rows, width, rank, vocab = 11, 6, 4, 23
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocab, bias=False).requires_grad_(False)
    states, latents, correction = (
        torch.randn(shape, requires_grad=True) for shape in ((1, rows, width), (1, rows, rank), (vocab, rank))
    )
    features, tokens = torch.randn(rows, width), torch.randint(-1, vocab, (rows,))
    weights = torch.rand(1, rows) if weighted else None
    overlap = torch.empty(1, rows)
    pairs = Pairs(states, tokens if tokens_only else features, weights, tokens, latents)
    divergence = losses.cross_entropy if tokens_only else losses.total_variation
    term = None if tokens_only else TextTokens(0.3)
    found = divergence_sum(pairs, head, divergence, term, chunk, (), correction, overlap)
    given = states, latents, correction
    gradients = torch.autograd.grad(2.5 * found.sum(), given)
    log_q = (states[0] @ head.weight.T + latents[0] @ correction.T).log_softmax(-1)
    p = (features @ head.weight.T).softmax(-1)
    known = tokens >= 0
    of_tokens = -torch.where(known, log_q.gather(1, tokens.clamp_min(0)[:, None])[:, 0], 0)
    shared = torch.minimum(p, log_q.exp()).sum(-1)
    each = of_tokens if tokens_only else 1 - shared + 0.3 * of_tokens
    expected = (each if weights is None else each * weights[0]).sum()
    torch.testing.assert_close(found.sum(), expected)
    if not tokens_only:
        torch.testing.assert_close(overlap[0], shared.detach())
    for one, other in zip(gradients, torch.autograd.grad(2.5 * expected, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


KINDS = [
    {},
    {"markov_head": "gated", "draft_vocab": 60, "position_weights": "d-pace", "confidence_weight": 0.5},
    {"markov_head": "rnn", "layout": "fill-in", "confidence_head": False, "classification_loss": "cross_entropy"},
    {"markov_head": "gated", "classification_loss": "lk_alpha"},
    {"markov_head": "rnn", "classification_loss": "lk_lambda", "lk_eta": 2.0, "position_weights": "uniform"},
]


@pytest.mark.parametrize("more", KINDS)
def test_the_loss_is_the_one_of_the_paper(settings: dict[str, Any], more: dict[str, Any]) -> None:
    """Catches a previous token that is off by one, a memory that outlives its block, a confidence label with a gradient
    or of uncorrected logits, an L1 norm that counts half."""
    task, batch = tiny_run.task_of("dspark", settings | more, 1, 3)
    config, parameters = task.config, dict(task.module.named_parameters())
    for weights in task.module.markov_head.parameters():
        weights.data.normal_(std=0.3)

    def corrected(logits: Tensor, previous: Tensor, states: Tensor) -> Tensor:
        known = previous.tolist()
        biases = [markov_bias(parameters, config.head.markov_head, known[: k + 1], states) for k in range(len(known))]
        return logits + torch.stack(biases)

    def of_confidence(tokens: Tensor, states: Tensor, overlap: Tensor) -> Tensor:
        inputs = torch.cat([states, parameters["markov_head.markov_w1.weight"][tokens[:-1]]], dim=-1)
        weight, bias = parameters["confidence_head.proj.weight"], parameters["confidence_head.proj.bias"]
        estimate = (inputs @ weight[0] + bias).sigmoid()
        return config.confidence_weight * F.binary_cross_entropy(estimate, overlap, reduction="none")

    of_confidence_head = of_confidence if config.head.confidence_head else None
    check_loss(task, task.choose(batch, seed=0), corrected, of_confidence_head)


def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel) -> None:
    """Catches a Markov head that stays as it was, a checkpoint that drafts with another layout, missing figures."""
    learning = {"steps": 25, "warmup_steps": 3, "tau_every": 25, "tau_new_tokens": 8, "markov_head": "rnn"}
    _, seen, drafter = tiny_run.learned("dspark", settings | learning | {"draft_vocab": 60}, target, 0.95)
    assert {"heldout_confidence_loss", "heldout_confidence_error", "heldout_slot_5_top1", "heldout_tau_tree"} <= seen
    shape = drafter.module.shape
    assert shape.layout == "anchor-first" and shape.markov_head == "rnn"
    assert float(drafter.module.markov_head.markov_w2.weight.std()) > 0.03  # it began with 0.02


@pytest.mark.long
def test_tau_rises(settings: dict[str, Any], target: TargetModel, tmp_path: Path) -> None:
    """Catches a Markov head that drafts after other tokens than in training, and a confidence that learns nothing."""
    values = settings | {"features": str(own_text(tmp_path / "own", target)), "steps": 150, "tau_every": 150}
    run: Any = tiny_run.train_here("dspark", values | {"tau_new_tokens": 20, "token_weight": 1.0})
    rows = read_metrics(run.config.out)
    first, last = [row["heldout_tau"] for row in rows if "heldout_tau" in row]
    assert first < 1.5 and last > 2 * first, (first, last)
    before, *_, after = [row["heldout_confidence_error"] for row in rows if "heldout_confidence_error" in row]
    assert after < 0.5 * before, (before, after)


def test_a_dry_run(settings: dict[str, Any]) -> None:
    """Catches an estimate that cannot be traced through the Markov head."""
    report = dry_run(tiny_run.read("dspark", settings), tiny_run.arguments())
    assert not report.problems and "anchors: 162" in report.text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"confidence_weight": 0}, "trains no confidence head; set confidence_head=false"),
        ({"target_weight": 0, "classification_loss": "total_variation"}, "the confidence head learns from the target"),
        ({"confidence_head": False, "confidence_weight": 2.0}, "confidence_head false"),
        ({"zero_stage": 3}, "zero_stage is 3"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], change: dict[str, Any], told: str) -> None:
    """Catches a confidence head that stays random, and options that would be ignored for hours."""
    with pytest.raises(ValueError, match=told):
        tiny_run.read("dspark", settings | change)
