"""The feature dump, a training step and a speed test on the simulated GPU: values as on the CPU, and few copies."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_eval_speed
import test_features
import tiny_run
import torch
from simulated_cuda import CUDA, simulated_cuda
from test_eval_speed import files  # noqa: F401
from torch import nn

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from train.core.config import TrainConfig
from train.core.optimizer import MasterAdamW
from train.core.runtime import Ranks
from train.core.task import make_task
from train.data.packing import Position
from train.run import loop
from train.run.inputs import open_inputs
from train.run.loop import TrainRun

KINDS = ("eagle", "kangaroo")
STEPS = 3


def test_the_dump(tmp_path: Path, target_folder: Path) -> None:
    """Catches shards written before their copies arrived, and batches for which the host waits for the device."""
    config = test_features.write_config(tmp_path, target_folder, count=6, dtype="float32")
    test_features.run(config)
    with simulated_cuda() as gpu:
        test_features.run(config, "device=cuda", f"out={tmp_path / 'there'}")
    for split in ("train", "heldout"):
        plain, there = (FeatureStore.open(tmp_path / out / split) for out in ("out", "there"))
        assert len(plain) == len(there) > 0 and len(plain.manifest.shards) > (split == "train")
        for one, other in zip(plain, there, strict=True):
            torch.testing.assert_close(other.features, one.features, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(other.taps[2], one.taps[2], atol=1e-4, rtol=1e-3)
    in_dump = [event for event in gpu.log if event.where.startswith("data_prep/extraction/dump.py")]
    kinds = Counter(event.kind for event in in_dump)
    assert kinds["read"] == kinds["upload"] == 0, gpu.places("read", "upload")
    assert kinds["late read"] >= 2 * 9 and kinds["late upload"] >= 2 and kinds["wait"] >= 2  # features and a tap


class OneProcess(MasterAdamW):
    """In place of DeepSpeed's engine, which cannot run here: what the loop asks of it, in one process, float32."""

    def __init__(self, module: nn.Module, config: TrainConfig, device: torch.device) -> None:
        super().__init__(module.to(device), config)
        self.device = device

    def update(self, learning_rate: float, *rest: object) -> torch.Tensor:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        self.step()
        return norm.double().reshape(1)


def train(kind: str, device: torch.device, target: str, features: Path, out: Path) -> tuple[TrainRun, list[Any]]:
    """A few steps through the run's own loop, and a held-out evaluation; what was reported."""
    more = {"exit_layer": tiny_run.TAP} if kind == "kangaroo" else {}
    settings = tiny_run.settings(target, features, out, gradient_accumulation=2, **more)
    config = tiny_run.read(kind, settings)
    inputs = open_inputs(config)
    torch.manual_seed(0)
    task = make_task(config, inputs.ends)
    with mock.patch.object(loop, "Engine", lambda module, config, *rest: OneProcess(module, config, device)):
        run = TrainRun(task, inputs, Ranks(0, 1), False, [])
    reported: list[Any] = []
    bar = mock.Mock()
    with mock.patch.object(run, "_report", lambda bar, losses, norm, *rest: reported.append((losses, norm))):
        steps = run.data.steps(Position())
        for _ in range(STEPS):
            run._step(steps, bar)
        steps.close()
    run._evaluate(bar)
    run.check.close()
    assert run.metrics is not None
    run.metrics.close()
    return run, reported


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step(kind: str, target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches a batch that is not pinned, a loss read to be logged, masks made on the wrong device: one read a step."""
    plain, expected = train(kind, torch.device("cpu"), target.name, features, tmp_path / "cpu")
    with simulated_cuda() as gpu:
        there, found = train(kind, CUDA, target.name, features, tmp_path / "gpu")
        weights = {name: value.cpu() for name, value in there.engine.module.state_dict().items()}
    assert there.data.pin and not plain.data.pin
    for (losses, norm), (same, same_norm) in zip(expected, found, strict=True):
        assert same == pytest.approx(losses, rel=1e-4) and same_norm == pytest.approx(norm, rel=1e-4)
    for name, value in plain.engine.module.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=1e-3)
    in_steps = gpu.places("read")
    reads = sum(count for where, count in in_steps.items() if where.endswith("in _step"))
    others = [
        where
        for where in in_steps
        if where.startswith(
            ("train/core/task.py", "train/eagle.py", "train/kangaroo.py", "train/losses", "train/attention")
        )
    ]
    assert reads == STEPS and not others, in_steps
    uploads = gpu.places("upload")
    assert sum(count for where, count in uploads.items() if "_total" in where) == STEPS
    assert not [where for where in uploads if where.endswith(("in _loss", "in _step"))], uploads


def test_a_speed_test(files: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    """Catches a program that works on CPUs alone: its clock, its facts, its memory, its stock generate."""
    config = test_eval_speed.config_for(files, tmp_path / "out", rounds=1, max_new_tokens=6, temperatures=[0.0])
    config["target"]["device"] = "cuda"
    config["prompts"]["count"] = 2
    with simulated_cuda() as gpu:
        assert test_eval_speed.run(config) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["environment"]["gpu"] == "Simulated GPU" and report["environment"]["device"].startswith("cuda")
    assert all(row["exact_match"] == 1.0 for row in report["rows"] if row["lossless"])
    assert gpu.count("replay") > 0 and all(row["tokens_per_second"] > 0 for row in report["rows"])
