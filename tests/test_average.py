"""train/core/average.py: the averaged weights are judged and exported, the others trained, and a state holds both."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from torch import nn

from drafters import TargetModel
from train.core.average import WeightAverage
from train.run.files import read_metrics


def test_average_by_hand() -> None:
    """A decay the wrong way round, an average of the beginning, in bf16, or one that the module keeps."""
    module = nn.Linear(1, 1, bias=False).bfloat16()
    module.weight.data.fill_(1.0)
    average = WeightAverage(module, 0.25)
    module.weight.data.fill_(3.0)
    average.update(0)  # decay 1/10, then 2/11, then the config's
    assert float(average.weights["weight"]) == pytest.approx(0.1 * 1 + 0.9 * 3)
    average.update(1)
    assert float(average.weights["weight"]) == pytest.approx(2 / 11 * 2.8 + 9 / 11 * 3)
    module.weight.data.fill_(7.0)
    average.update(500)
    expected = 0.25 * (2 / 11 * 2.8 + 9 / 11 * 3) + 0.75 * 7
    assert float(average.weights["weight"]) == pytest.approx(expected)
    with average.in_place():
        assert float(module.weight) == pytest.approx(expected, rel=0.01)
    assert float(module.weight) == 7.0


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 2, "precision": "bf16"}])
def test_a_run(target: TargetModel, features: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Training from the average, held-out figures or an export of the weights without it, a resumed run that begins
    another average."""
    plain = tiny_run.settings(target.name, features, tmp_path / "plain", steps=8, save_every=4, **changes)
    values = {**plain, "out": str(tmp_path / "averaged"), "weight_average": 0.9}
    tiny_run.train_here("eagle", plain)
    run = tiny_run.train_here("eagle", values)
    before, after = (read_metrics(Path(each["out"])) for each in (plain, values))
    assert [row["loss"] for row in before if "loss" in row] == [row["loss"] for row in after if "loss" in row]
    judged = [[row["heldout_loss"] for row in rows if "heldout_loss" in row] for rows in (before, after)]
    assert judged[0][0] == judged[1][0] and judged[0][-1] != judged[1][-1]
    exported = load_file(Path(values["out"]) / "model.safetensors")
    for name, weights in run.average.weights.items():
        torch.testing.assert_close(exported[name].float(), weights, rtol=0.01, atol=1e-3)
    weights = run.engine.weights()
    assert not torch.allclose(weights["fc.weight"].float(), exported["fc.weight"].float(), rtol=0.01, atol=1e-3)
    half = {**values, "out": str(tmp_path / "half")}
    tiny_run.train_here("eagle", {**half, "steps": 4, "schedule": "constant"})
    tiny_run.train_here("eagle", {**half, "schedule": "constant"}, resume=True)
    whole = {**values, "out": str(tmp_path / "whole"), "schedule": "constant"}
    tiny_run.train_here("eagle", whole)
    ours, theirs = (load_file(Path(each["out"]) / "model.safetensors") for each in (half, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
