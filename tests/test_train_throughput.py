"""train/tools/throughput.py and the plain formulation that it compares with (train/bench/reference.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml

from data_prep.store.reader import FeatureStore
from drafters.model.ends import FrozenEnds
from train.bench.reference import SampleFiles, pad, plain_loss_sum, write_samples
from train.core.task import Task, make_task
from train.data.packing import collate
from train.tools import throughput

DIALOGUES = [3, 0, 1, 2, 6]


def task_of(kind: str, folder: Path, ends: FrozenEnds, **changes: Any) -> Task:
    if kind == "kangaroo":
        changes["exit_layer"] = tiny_run.TAP
    values = tiny_run.settings(str(folder / "target"), folder / "features", folder / "out", **changes)
    return make_task(tiny_run.read(kind, values), ends)


@pytest.mark.parametrize(
    ("kind", "alignment"), [("eagle", "shifted"), ("eagle", "paper-code"), ("kangaroo", ""), ("medusa", "")]
)
def test_plain_formulation_has_our_loss_and_gradients(
    kind: str, alignment: str, folder: Path, store: FeatureStore, ends: FrozenEnds, tmp_path: Path
) -> None:
    """A reference that computes something else: other positions, another target, padding that counts, mixed files."""
    task = task_of(kind, folder, ends, **({"mask_alignment": alignment} if alignment else {}))
    packed = collate(store, DIALOGUES, task.config.taps)
    rows = task.rows(packed)
    ours = tiny_run.losses_of(task, packed)["loss"]
    expected = torch.autograd.grad(ours, list(task.module.parameters()))
    write_samples(store, DIALOGUES, tmp_path / "samples")
    files = SampleFiles(tmp_path / "samples")
    batch = pad([files[index] for index in DIALOGUES])
    assert batch.input_ids.shape == (5, 23) and batch.tokens == packed.tokens
    batch = tiny_run.with_rows(task, batch)
    theirs = plain_loss_sum(task, task.module, batch)
    assert len(rows) == len(task.rows(batch)) > 20
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(theirs, list(task.module.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    with_noise = plain_loss_sum(task, task.module, batch, seed=1)
    assert torch.equal(with_noise, theirs) == (kind != "eagle")


@pytest.mark.parametrize("kind", ["eagle", "kangaroo"])
def test_a_run_config_gives_both_sides(kind: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Sides that train on different dialogues, tokens that include padding, rounds or warm-up miscounted."""
    changes = {"exit_layer": tiny_run.TAP} if kind == "kangaroo" else {}
    values = tiny_run.settings(str(folder / "target"), folder / "features", tmp_path / "run", **changes)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    options = ["--config", str(tmp_path / "run.yaml"), "--rounds", "2", "--steps", "1", "--peak-tflops", "0.1"]
    throughput.main([*options, "gradient_accumulation=2", "--out", str(tmp_path / "out" / "result.json")])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    ours, plain = result["ours"], result["plain"]
    pairs = [one / other for one, other in zip(ours["rounds"], plain["rounds"], strict=True)]
    assert len(pairs) == 2
    assert result["ratio"] == pytest.approx(sum(pairs) / 2, rel=1e-2)
    assert 0 <= ours["padding"] <= plain["padding"] < 1
    assert 0 <= ours["data_wait"] <= 1 and 0 <= plain["data_wait"] <= 1
    assert ours["mfu"] / plain["mfu"] == pytest.approx(ours["tokens_per_second"] / plain["tokens_per_second"], rel=0.05)
    assert result["config"]["gradient_accumulation"] == 2 and result["environment"]["versions"]["torch"]
    assert not (tmp_path / "run").exists()
    printed = capsys.readouterr().out
    assert "ratio  " in printed and "times the tokens/s (median of 2 rounds)" in printed


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_a_method_without_plain_formulation_is_measured_alone(method: str, tmp_path: Path) -> None:
    """Catches an error in the middle of a measurement on a GPU, blocks trained without anchors, and blocks whose
    length was not given."""
    shape = "hidden=64,vocab=128,heads=4,kv_heads=2,intermediate=64"
    options = ["--shape", shape, "--method", method, "--rounds", "1", "--steps", "1", "--tokens", "100"]
    options += ["--peak-tflops", "0.1", "--out", str(tmp_path / "result.json"), "precision=float32"]
    if method == "dspark":
        with pytest.raises(ValueError, match="dspark has no default for block_size: add block_size=N"):
            throughput.main(options)
        options.append("head.block_size=3")
    assert throughput.main(options) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["sides"] == ["ours"] and result["ratio"] is None
    assert result["ours"]["tokens_per_second"] > 0 and result["ours"]["mfu"] > 0
