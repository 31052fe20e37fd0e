"""train/core/unroll.py: a head's steps on its own predictions are those of decoding, and their losses those by hand."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from torch import nn

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from drafters.config import SHIFTED, UNSHIFTED, HeadInputs
from drafters.methods.eagle import EagleDrafter
from drafters.model.ends import FrozenEnds
from train.core.engine import checkpoint_activations
from train.core.unroll import unrolled
from train.data.packing import Batch, collate
from train.eagle import EagleConfig, EagleTask
from train.run.files import read_metrics

OTHERS: tuple[HeadInputs, ...] = (UNSHIFTED, "token", "feature")
DIALOGUES = [3, 0, 1, 2, 6]  # of the training store: lengths 23, 9, 17, 5, 7
STEPS = 4


def task_of(folder: Path, ends: FrozenEnds, **changes: object) -> EagleTask:
    """A task whose head's attention makes a difference."""
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", noise="none", **changes)
    task = EagleTask(EagleConfig(**values), ends)
    for weights in task.module.parameters():
        if weights.dim() == 2:
            nn.init.normal_(weights, std=0.15)
    return task


@pytest.mark.parametrize(
    ("family", "inputs"),
    [("llama", SHIFTED), ("qwen3", SHIFTED), ("mistral", SHIFTED), *(("llama", other) for other in OTHERS)],
)
@torch.no_grad()
def test_steps_equal_decoding(family: str, inputs: HeadInputs, tmp_path: Path) -> None:
    """A step that sees a true feature past its chain's beginning, another chain's prediction or another dialogue, that
    forgets its own earlier steps, or has another position than in decoding."""
    target = tiny_run.save_target(tmp_path / "target", family)
    features = tiny_run.write_stores(tmp_path / "features", target)
    store = FeatureStore.open(features / "train")
    model: Any = target.model
    ends = FrozenEnds(model.model.embed_tokens, model.lm_head, target.config, "")
    task = task_of(tmp_path, ends, inputs=inputs)
    batch = collate(store, DIALOGUES)
    found = list(unrolled(task.module, ends.embed, batch, STEPS, task.token_shift))
    drafter = EagleDrafter.from_weights(target, task.module.state_dict(), {"tree": "chain"} | task.head.stored())
    for row, start, length, _ in batch.spans:
        tokens, true = (part[row : row + 1, start : start + length] for part in (batch.input_ids, batch.features))
        for first in {0, 1, length - STEPS - 1} - {length - STEPS}:  # the first index of a chain that stays in it
            drafter.head.cache = target.new_cache(1, 64, layers=1)
            given, text = true[:, : first + 1], tokens[:, 1 : first + 2]
            if inputs == UNSHIFTED:
                given = torch.cat([given, target.embed(tokens[:, : first + 1])], dim=-1)
            for step in range(STEPS):
                predicted = drafter.head.extend(given, text)[:, -1:]
                drafter.head.cache.commit_first([given.shape[1]])
                ours, theirs = found[step][row, start + first], predicted[0, 0, : target.hidden_size]
                scale = float(theirs.abs().max())  # of sums that cancel
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale)
                given, text = predicted, tokens[:, first + step + 2 : first + step + 3]


def by_hand(task: EagleTask, store: FeatureStore, index: int) -> list[torch.Tensor]:
    """Each step's loss of one dialogue, chain by chain, without a cache or a mask."""
    item, ends, sums = store[index], task.ends, [torch.zeros(()) for _ in range(STEPS)]
    for row in range(STEPS - 1, len(item.input_ids) - 2):
        if not item.loss_mask[row + 2]:
            continue
        for step in range(STEPS):
            states = item.features[: row - step + 1]
            for fed in range(step + 1):
                embeddings = ends.embed(item.input_ids[1 : len(states) + 1])
                predicted = task.module(states[None], embeddings[None], torch.arange(len(states))[None])[0, -1]
                if fed < step:
                    states = torch.cat([states, predicted.detach()[None]])
            known = item.features[row + 1]
            classification = -(ends.lm_head(known).softmax(-1) * ends.lm_head(predicted).log_softmax(-1)).sum()
            sums[step] = sums[step] + F.smooth_l1_loss(predicted, known) + 0.1 * classification
    return sums


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_equal_those_by_hand(folder: Path, store: FeatureStore, ends: FrozenEnds, checkpointing: bool) -> None:
    """A step against another's target, a gradient through what is fed back, a weight that is lost; keys of later steps
    instead of the earlier ones' when the forward pass is done again."""
    task = task_of(folder, ends, unroll=STEPS, unroll_weight=0.5)
    batch = collate(store, DIALOGUES)
    expected = [sum(parts) for parts in zip(*(by_hand(task, store, index) for index in DIALOGUES), strict=True)]
    reference = sum(0.5**step * value for step, value in enumerate(expected))
    (gradient,) = torch.autograd.grad(reference, [task.module.layers[0].self_attn.k_proj.weight])
    if checkpointing:
        checkpoint_activations(task.module)
    sums = tiny_run.losses_of(task, batch, 1)
    sums["loss"].backward()
    torch.testing.assert_close(sums["loss"], reference, rtol=1e-5, atol=1e-5)
    for step, value in enumerate(expected):
        number = f"_{step}" if step else ""
        parts = sums[f"regression_loss{number}"] + 0.1 * sums[f"classification_loss{number}"]
        torch.testing.assert_close(parts, value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(task.module.layers[0].self_attn.k_proj.weight.grad, gradient, rtol=1e-4, atol=1e-4)


def test_the_first_step_is_the_training_without_any(folder: Path, store: FeatureStore, ends: FrozenEnds) -> None:
    """Another first step than the default's, or a rank without work that takes part in fewer collectives."""
    batch = collate(store, DIALOGUES)
    plain, task = task_of(folder, ends), task_of(folder, ends, unroll=2)
    task.module.load_state_dict(plain.module.state_dict())
    rows = task.rows(batch)
    sums = tiny_run.losses_of(task, batch, 1)
    alone = plain.losses(plain.pairs(plain.module, tiny_run.with_rows(task, batch), 1))
    assert float(sums["regression_loss"]) == pytest.approx(float(alone["regression_loss"]), rel=1e-6)
    assert set(plain.rows(batch).tolist()) - set(rows.tolist()) <= {span.start for span in batch.spans}
    calls = 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return task.module(*arguments)

    empty = collate(store, [1])
    empty = Batch(**{**vars(empty), "loss_mask": torch.zeros_like(empty.loss_mask), "spans": []})
    tiny_run.losses_of(task, empty, 1, counted)["loss"].backward()
    assert calls == 2


@pytest.mark.parametrize(
    "changes", [{"zero_stage": 2, "gradient_accumulation": 2}, {"zero_stage": 3, "activation_checkpointing": True}]
)
def test_a_run(target: TargetModel, features: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Gradients of the several forwards that ZeRO reduces once or not at all, or a run that does not learn."""
    values = tiny_run.settings(target.name, features, tmp_path / "run", unroll=2, steps=12)
    tiny_run.train_here("eagle", values)
    tiny_run.train_here("eagle", {**values, **changes, "out": str(tmp_path / "other")})
    ours, others = (
        [row for row in read_metrics(tmp_path / name) if "regression_loss_1" in row] for name in ("run", "other")
    )
    assert ours[-1]["loss"] < 0.9 * ours[0]["loss"]
    assert ours[-1]["classification_loss_1"] < ours[0]["classification_loss_1"]
    # Later on sums in another order move the norm of some steps by a tenth. Which steps depends on the processor.
    for name, steps in (("loss", 4), ("regression_loss_1", 4), ("grad_norm", 2)):
        assert [row[name] for row in others[:steps]] == pytest.approx([row[name] for row in ours[:steps]], rel=1e-3)
