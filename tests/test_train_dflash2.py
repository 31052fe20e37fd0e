"""train/dflash2.py: what it adds to DFlash's training."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
import torch.nn.functional as F
from block_reference import selector_scores
from test_train_dflash import BLOCK, own_text, reference
from torch import Tensor

from drafters import TargetModel, generate, load_drafter
from drafters.hub.checkpoint import load_checkpoint
from train.core.weights import init_from
from train.preflight.dry_run import dry_run
from train.run.files import read_metrics

SELECTOR = {"selector_rank": 8, "selector_top_k": 6, "conv_group_size": 8}
ALL = "candidate_selector."


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", tap_layers=[tiny_run.TAP], **BLOCK, **SELECTOR)


def dflash_of(settings: dict[str, Any], tmp_path: Path, steps: int = 5) -> dict[str, Any]:
    """A trained DFlash head, and the settings of a DFlash2 run that begins with it."""
    values = {key: value for key, value in settings.items() if key not in SELECTOR} | {"out": str(tmp_path / "dflash")}
    tiny_run.train_here("dflash", values | {"steps": steps})
    return settings | {"init_from": str(tmp_path / "dflash")}


KINDS = [
    {},
    {"position_weights": "d-pace", "selector_weight": 0.5, "mask_embedding": True},
    {"layout": "anchor-first", "token_weight": 0.3, "layers": 2, "conv_kernel_size": 3, "sliding_window": 6},
    {"position_weights": "uniform", "trains": "selector"},
]


@pytest.mark.parametrize("more", KINDS)
def test_the_loss_is_the_one_described(settings: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    """Catches a token before that is off by one, a missing truth that is not put among the candidates, unary scores
    without a gradient, convolutions across blocks, weights of other slots."""
    frozen = more.get("trains") == "selector"
    values = (dflash_of(settings, tmp_path) if frozen else settings) | more
    task, batch = tiny_run.task_of("dflash2", values, 1, 3)
    config, parameters = task.config, dict(task.module.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for name, weights in parameters.items():
        if name.startswith(ALL) or "_conv." in name:
            std = 0.5 if name.startswith(ALL) else 0.2 if weights.dim() == 3 else 0.02
            weights.data += std * torch.randn(weights.shape, generator=generator)
    batch = task.choose(batch, seed=0)
    found = task.losses(task.pairs(task.module, batch, seed=0))["loss"]
    found.backward()
    gradients = {name: weights.grad for name, weights in parameters.items()}
    task.module.zero_grad()
    injected = []

    def of_selector(tokens: Tensor, states: Tensor, overlap: Tensor) -> Tensor:
        each = []
        for slot, state in enumerate(states):
            truth, count = int(tokens[slot + 1]), config.head.selector_top_k
            logits = task.ends.lm_head.weight @ state
            if injects := truth not in logits.topk(count).indices:
                last = int(logits.topk(count).indices[-1])
            scores = selector_scores(parameters, count, logits, int(tokens[slot]), state)
            if injects:
                only = torch.arange(len(logits)) == truth
                own = selector_scores(parameters, len(logits), logits, int(tokens[slot]), state)
                scores = torch.where(torch.arange(len(logits)) == last, -torch.inf, torch.where(only, own, scores))
            injected.append(injects)
            each.append(F.cross_entropy(scores, torch.tensor(truth)))
        return config.selector_weight * torch.stack(each)

    plain = task.config
    if frozen:
        task.config = plain.model_copy(update={"target_weight": 1e-30})
    expected = reference(task, batch, lambda logits, previous, states: logits, of_selector)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert any(injected) and not all(injected)
    expected.backward()
    for name, weights in parameters.items():
        if weights.requires_grad:
            atol = max(5e-5, 1e-5 * float(weights.grad.abs().max()))  # small elements of large sums round
            torch.testing.assert_close(gradients[name], weights.grad, rtol=1e-3, atol=atol, msg=name)
    assert {name for name, found in gradients.items() if found is None} == {
        name for name in parameters if frozen and not name.startswith(ALL)
    }


def test_a_dflash_head_is_a_dflash2_head(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches convolutions that do not begin as the identity, and weights of the DFlash head that are not taken."""
    values = dflash_of(settings, tmp_path)
    task, batch = tiny_run.task_of("dflash2", values, 1, 3)
    plain = {key: value for key, value in values.items() if key not in SELECTOR}
    before, _ = tiny_run.task_of("dflash", plain, 1)
    for one in (task, before):
        init_from(one, values["init_from"])
    ours, theirs = (one.states(one.module, one.choose(batch, 0)) for one in (task, before))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="set head.mask_token_id=2, or another init_from"):
        other, _ = tiny_run.task_of("dflash2", values | {"mask_token_id": 3}, 0)
        init_from(other, values["init_from"])
    with pytest.raises(ValueError, match="of type 'dflash', and this trains 'dspark'; name one of type 'dspark'"):
        more = {key: value for key, value in values.items() if key not in SELECTOR} | {"layout": "fill-in"}
        tiny_run.train_here("dspark", more | {"out": str(tmp_path / "other")})


def test_only_the_selector_learns(settings: dict[str, Any], target: TargetModel, tmp_path: Path) -> None:
    """Catches a backbone that moves, a selector that does not, and a resumed run without the backbone."""
    values = dflash_of(settings, tmp_path) | {"trains": "selector", "steps": 6, "schedule": "constant"}
    tiny_run.train_here("dflash2", values)
    parts = values | {"out": str(tmp_path / "parts")}
    tiny_run.train_here("dflash2", parts | {"steps": 3})
    tiny_run.train_here("dflash2", parts, resume=True)
    before = load_checkpoint(values["init_from"])[1]
    whole, resumed = (load_checkpoint(each["out"])[1] for each in (values, parts))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole) and whole.keys() == resumed.keys()
    assert all(torch.equal(value, whole[name]) for name, value in before.items())
    losses = [row[name] for row in read_metrics(Path(parts["out"])) if (name := "heldout_selector_loss") in row]
    assert losses[-1] < losses[0]
    assert load_drafter(values["out"], target).name == "dflash2"


@pytest.mark.long
def test_tau_rises(settings: dict[str, Any], target: TargetModel, tmp_path: Path) -> None:
    """Catches a selector that drafts after other tokens than in training, figures of the scores before it, a mask
    embedding that stays as it was."""
    values = settings | {"features": str(own_text(tmp_path / "own", target)), "steps": 150, "tau_every": 150}
    more = {"tau_new_tokens": 20, "token_weight": 1.0, "mask_embedding": True}
    run: Any = tiny_run.train_here("dflash2", values | more)
    rows = read_metrics(run.config.out)
    first, last = [row["heldout_tau"] for row in rows if "heldout_tau" in row]
    assert first < 1.5 and last > 2 * first, (first, last)
    assert {"heldout_selector_loss", "heldout_slot_4_top1", "heldout_tau_tree"} <= {
        name for row in rows for name in row
    }
    drafter: Any = load_drafter(run.config.out, target)
    assert float(drafter.module.mask_embedding.norm()) > 0.1  # that of the padding, which it began with, is zero
    assert generate(target, drafter, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6).tokens.shape == (1, 6)


def test_heldout_figures_are_of_the_selector(settings: dict[str, Any]) -> None:
    """Catches an acceptance of the scores before the selector, or with the truth among the candidates."""
    task, batch = tiny_run.task_of("dflash2", settings, 1, 3)
    for weights in task.module.candidate_selector.parameters():
        weights.data.normal_(std=0.5)
    batch = task.choose(batch)
    pairs = task.pairs(task.module, batch)
    (overlap,), (agree,) = task.heads.compare(pairs)
    parameters = dict(task.module.named_parameters())
    for row in range(len(pairs.targets)):
        state, before = pairs.predictions[0, row], int(pairs.previous[row])
        logits = task.ends.lm_head.weight @ state
        q = selector_scores(parameters, 6, logits, before, state).softmax(-1)
        p = (task.ends.lm_head.weight @ pairs.targets[row]).softmax(-1)
        torch.testing.assert_close(overlap[row], torch.minimum(p, q).sum(), rtol=1e-4, atol=1e-5)
        assert bool(agree[row]) == (int(p.argmax()) == int(q.argmax()))


def test_a_dry_run(settings: dict[str, Any]) -> None:
    """Catches an estimate that cannot be traced through the selector."""
    report = dry_run(tiny_run.read("dflash2", settings), tiny_run.arguments(measure=True))
    assert not report.problems and "anchors: 162" in report.text() and "tokens/s" in report.text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"selector_weight": 0}, "selector_weight is 0, which trains no selector"),
        ({"trains": "selector"}, "trains is selector, and the rest of the head must be a trained one; set init_from"),
        ({"draft_vocab": 60}, "draft_vocab is 60, and the selector chooses among all tokens"),
        ({"loss_vocab": 60}, "loss_vocab is 60, and the selector chooses among all tokens"),
        ({"zero_stage": 3}, "zero_stage is 3"),
        ({"conv_kernel_size": 6}, "conv_kernel_size is 6, and block_size 5; give that or less"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], change: dict[str, Any], told: str) -> None:
    """Catches a selector that stays random, and options that would be ignored for hours."""
    with pytest.raises(ValueError, match=told):
        tiny_run.read("dflash2", settings | change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"conv_group_size": 7}, "conv_group_size is 7, which does not divide the target's hidden size of 48"),
        ({"selector_top_k": 98}, "selector_top_k is 98, and the target's vocabulary has 97 tokens"),
    ],
)
def test_another_targets_sizes_are_refused(settings: dict[str, Any], change: dict[str, Any], told: str) -> None:
    """Catches a head that is built all the same, and fails in its first step."""
    assert tiny.HIDDEN_SIZE == 48 and tiny.VOCAB_SIZE == 97
    with pytest.raises(ValueError, match=told):
        tiny_run.task_of("dflash2", settings | change)
