"""Where a head with ``start: regression`` begins: fc's least squares, by hand, and a layer that adds nothing yet."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from families import DECODED, build
from test_families import OWN_LAYERS
from torch import Tensor

from data_prep.store.reader import FeatureStore
from drafters.config import SHIFTED, UNSHIFTED, HeadInputs
from drafters.heads.eagle.module import EagleHead
from drafters.model.ends import FrozenEnds
from train.data import regression
from train.data.regression import RIDGE, add_nothing, fit_fc, least_squares
from train.eagle import EagleConfig, EagleTask
from train.run.files import read_metrics


def test_least_squares() -> None:
    """Catches parts that are not added up, a ridge that grows with an input's scale, and noise counted once."""
    torch.manual_seed(0)
    x, y = torch.randn(300, 7) * torch.logspace(-2, 2, 7), torch.randn(300, 3)
    noise = torch.linspace(0.0, 0.5, 7)
    found = least_squares([(x[:100], y[:100]), (x[100:], y[100:])], noise)
    ridge = (RIDGE * x.pow(2).sum(0) + 300 * noise).sqrt().diag()
    stacked = torch.linalg.lstsq(torch.cat([x, ridge]).double(), torch.cat([y, torch.zeros(7, 3)]).double()).solution
    torch.testing.assert_close(found, stacked.T.float(), rtol=1e-4, atol=1e-6)
    same = torch.zeros(5, 2)  # inputs that never differ, nor say anything
    assert not least_squares([(same, torch.ones(5, 1))], torch.zeros(2)).any()
    with pytest.raises(ValueError, match="no trained position"):
        least_squares([(x[:0], y[:0])], noise)


def by_hand(store: FeatureStore, ends: FrozenEnds, shift: int) -> tuple[Tensor, Tensor]:
    """What fc reads and should say at every trained position."""
    pairs = [
        (torch.cat([ends.embed(item.input_ids[row + shift]), item.features[row]]), item.features[row + 1])
        for item in map(store.__getitem__, range(len(store)))
        for row in range(len(item.input_ids) - 2)
        if item.loss_mask[row + 2]
    ]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


@pytest.mark.parametrize(("inputs", "shift"), [(SHIFTED, 1), (UNSHIFTED, 0)])
@torch.no_grad()
def test_a_head_begins_with_it(
    folder: Path, store: FeatureStore, ends: FrozenEnds, inputs: HeadInputs, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a feature beside another position's token, rows of prompts, dialogues that run into each other, and a
    layer that adds noise to what was fitted."""
    monkeypatch.setattr(regression, "PART_TOKENS", 40)  # so that there are several parts
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", inputs=inputs)
    task = EagleTask(EagleConfig(**values, start="regression", noise="none"), ends)
    fit_fc(task, store, 0.0)
    x, y = by_hand(store, ends, shift)
    ridge = (RIDGE * x.pow(2).sum(0)).sqrt().diag()
    target = torch.cat([y, torch.zeros(len(ridge), y.shape[1])]).double()
    solution = torch.linalg.lstsq(torch.cat([x, ridge]).double(), target).solution.T.float()
    fc: Any = task.module.get_parameter("fc.weight")
    torch.testing.assert_close(fc, solution, rtol=1e-3, atol=1e-4)
    features, tokens = torch.randn(1, 6, ends.embed.embedding_dim), torch.randn(1, 6, ends.embed.embedding_dim)
    predicted = task.module(features, tokens, torch.arange(6)[None], None)
    torch.testing.assert_close(predicted, torch.cat([tokens, features], dim=-1) @ fc.T)


@pytest.mark.parametrize("family", OWN_LAYERS)
@torch.no_grad()
def test_no_layer_adds_anything(family: str) -> None:
    """Catches a family whose layer writes by a matrix of another name."""
    head = EagleHead(build(family, DECODED[family]).config)
    add_nothing(head)
    tokens, features = torch.randn(2, 1, 5, head.fc.out_features)
    torch.testing.assert_close(
        head(features, tokens, torch.arange(5)[None]), head.fc(torch.cat([tokens, features], dim=-1))
    )


def test_a_run(folder: Path, tmp_path: Path) -> None:
    """Catches a start that the optimizer's own copy of the weights does not have, a layer that stays nothing, and a
    run that restarts instead of going on."""
    target, features = str(folder / "target"), folder / "features"
    values = tiny_run.settings(target, features, tmp_path / "drawn", learning_rate=1e-3, schedule="constant")
    tiny_run.train_here("eagle", values)
    fitted = {**values, "start": "regression", "precision": "bf16"}
    tiny_run.train_here("eagle", {**fitted, "out": str(tmp_path / "fitted")})
    tiny_run.train_here("eagle", {**fitted, "out": str(tmp_path / "parts"), "steps": 3})
    tiny_run.train_here("eagle", {**fitted, "out": str(tmp_path / "parts")}, resume=True)
    drawn, whole, parts = (
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("drawn", "fitted", "parts")
    )
    assert whole[0] < 0.8 * drawn[0] and whole[-1] < whole[0]
    assert parts == whole
