"""train/medusa.py: what is its own; the loop is tested with EAGLE."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from drafters.methods.medusa import MedusaDrafter
from drafters.model.ends import FrozenEnds
from train.core.task import make_task
from train.data.packing import collate
from train.medusa import MedusaConfig, MedusaTask
from train.run.files import read_metrics

DIALOGUES = [3, 0, 1, 2, 6]
HEADS = 3


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", heads=HEADS)


def task_of(folder: Path, ends: FrozenEnds, **changes: Any) -> MedusaTask:
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", heads=HEADS, **changes)
    task = MedusaTask(MedusaConfig(**values), ends)
    for weights in task.module.parameters():
        weights.data += 0.1 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(weights.numel()))
    return task


@pytest.mark.parametrize(
    ("labels", "own", "kept"),
    [("target", False, None), ("target", True, 40), ("tokens", False, 40), ("tokens", True, None)],
)
def test_the_loss_is_the_papers(
    folder: Path, store: FeatureStore, ends: FrozenEnds, labels: str, own: bool, kept: int | None
) -> None:
    """Catches a head trained on another token than it predicts, lambda_k of another head, distributions over other
    tokens, a gradient to the wrong LM head, and rows across the border of two dialogues."""
    task = task_of(folder, ends, labels=labels, own_lm_heads=own, loss_vocab=kept)
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:kept] if kept else torch.arange(97)
    task.heads.ids = ids.int() if kept else None
    batch = collate(store, DIALOGUES, ())
    sums = tiny_run.losses_of(task, batch, 1)
    given = list(task.module.parameters())
    found = torch.autograd.grad(sums["loss"], given)
    expected, each, count = torch.zeros(()), [0.0] * HEADS, 0
    for index in DIALOGUES:
        item = store[index]
        states = task.module(item.features)  # [T, K, H]
        answer = item.loss_mask.nonzero()[:, 0].tolist()
        for t in (t for t in answer if t >= HEADS + 1):  # all heads have something to read
            count += 1
            p = ends.lm_head(item.features[t - 1])[ids].softmax(-1)
            if labels == "tokens":
                p = (ids == item.input_ids[t]).float()
            for k in range(1, HEADS + 1):
                lm_head = task.heads.drafter_heads[k - 1] if own else ends.lm_head
                loss = -(p * lm_head(states[t - k - 1, k - 1])[ids].log_softmax(-1)).sum()  # token i + k + 1, i = t-k-1
                expected, each[k - 1] = expected + 0.8**k * loss, each[k - 1] + loss.item()
    assert count == len(task.rows(batch)) > 20
    torch.testing.assert_close(sums["loss"], expected, rtol=1e-5, atol=1e-4)
    assert [float(sums[f"head_{k}_loss"]) for k in range(1, HEADS + 1)] == pytest.approx(each, rel=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_held_out_figures_by_head(folder: Path, store: FeatureStore, ends: FrozenEnds) -> None:
    """Catches the figures of one head under another's name, and a floor that no drafter can reach or get below."""
    task = task_of(folder, ends)
    batch = collate(store, DIALOGUES, ())
    pairs = task.pairs(task.module, tiny_run.with_rows(task, batch))
    figures = task.heldout(task.module, batch, pairs)
    p = ends.lm_head(pairs.targets).softmax(-1)
    for k in range(HEADS):
        q = ends.lm_head(pairs.predictions[k]).softmax(-1)
        overlap, agree = figures[f"head_{k + 1}_expected_acceptance"], figures[f"head_{k + 1}_top1"]
        assert float(overlap.total) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-5)
        assert int(agree.total) == int((p.argmax(-1) == q.argmax(-1)).sum()) and int(agree.count) == len(pairs.targets)
    entropy = float(-(p * p.log()).sum())
    assert float(task.losses(pairs.perfect())["loss"]) == pytest.approx((0.8 + 0.64 + 0.512) * entropy, rel=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel, own: bool) -> None:
    """Catches heads without a gradient, LM heads that do not begin as the target's, an export that does not load."""
    values: dict[str, Any] = {"steps": 60, "warmup_steps": 5, "own_lm_heads": own}
    values |= {"precision": "float32" if own else "bf16"} | {
        "tau_every": 60,
        "tau_prompts": 2,
        "tau_new_tokens": 8,
        "labels": "tokens",
    }
    run, _, drafter = tiny_run.learned("medusa", settings | values, target, 0.95)
    out = Path(settings["out"])
    rows = read_metrics(out)
    assert rows[0]["heldout_head_1_loss"] == pytest.approx(rows[0]["heldout_head_2_loss"], rel=0.2)  # as the target's
    names = {"heldout_tau", "heldout_tau_tree", "heldout_head_3_top1", "heldout_top1_at_0-15"}
    assert names <= {name for row in rows[-2:] for name in row}
    options = json.loads((out / "config.json").read_text())["drafter"]
    assert options == {"heads": HEADS, "layers": 1, "own_lm_heads": own}
    assert isinstance(drafter, MedusaDrafter) and len(drafter.head.lm_heads) == (HEADS if own else 1)
    if own:
        began, given = make_task(run.config, run.task.ends).heads.drafter_heads, run.task.ends.lm_head.weight
        assert all(torch.equal(head.weight, given) for head in began)
        assert not any(torch.equal(head.weight, given) for head in run.task.heads.drafter_heads)
