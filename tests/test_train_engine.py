"""The engine: precision of sums, ZeRO stages, ranks and offload: all must train the same."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file
from torch import nn

from drafters.config import validate
from drafters.heads.eagle.module import EagleHead
from train.core import engine
from train.core.losses import Pairs
from train.eagle import EagleConfig, EagleTask
from train.run import loop
from train.run.files import read_metrics

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("engine")
    features = tiny_run.write_stores(path / "features", tiny_run.save_target(path / "target"))
    values = tiny_run.settings(str(path / "target"), features, path / "unused", schedule="constant")
    return {**values, "gradient_accumulation": 2, "save_every": 3}


def figures(out: Path, *names: str) -> list[float]:
    return [row[name] for row in read_metrics(out) if "loss" in row for name in names]


def state(out: Path, step: int, kind: str = "weights") -> dict[str, torch.Tensor]:
    return load_file(out / "state" / f"step-{step:08d}" / f"{kind}.safetensors")


def jobs(settings: dict[str, Any], folder: Path, changes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    values = {name: {**settings, "out": str(folder / name), **change} for name, change in changes.items()}
    return [{"kind": "eagle", "values": each, "partition_all": True} for each in values.values()]


@pytest.mark.slow
def test_muon_is_the_same_at_every_stage(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a rank that takes another's part of a matrix, padding taken for weights, parts made orthogonal alone."""
    muon = {**settings, "optimizer": "muon", "weight_decay": 0.1}
    tiny_run.train_here("eagle", {**muon, "gradient_accumulation": 4, "out": str(tmp_path / "alone")})
    changes = {f"zero{stage}": {"zero_stage": stage} for stage in (0, 1, 2)}
    tiny_run.train_on_ranks(2, tmp_path, jobs(muon, tmp_path, changes))
    for name in changes:
        out = tmp_path / name
        assert figures(out, "loss") == pytest.approx(figures(tmp_path / "alone", "loss"), rel=1e-3), name
        for kind in ("weights", "exp_avg"):
            for key, value in state(tmp_path / "alone", 6, kind).items():
                ours = state(out, 6, kind)[key]
                assert (ours - value).norm() < 0.02 * value.norm(), (name, kind, key)
    assert all(value.dim() == 1 for value in state(tmp_path / "zero2", 6, "exp_avg_sq").values())


@pytest.mark.slow
def test_stages_offload_and_ranks_train_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    """A loss scaled for one stage only, a norm after clipping, weights that no rank updates or exports."""
    tiny_run.train_here("eagle", {**settings, "gradient_accumulation": 4, "out": str(tmp_path / "alone")})
    changes: dict[str, dict[str, Any]] = {f"zero{stage}": {"zero_stage": stage} for stage in STAGES}
    changes |= {f"offload{stage}": {"zero_stage": stage, "offload": "optimizer"} for stage in (1, 2, 3)}
    changes |= {"parameters": {"zero_stage": 3, "offload": "parameters"}}
    changes |= {"again": {"zero_stage": 3, "activation_checkpointing": True}}
    tiny_run.train_on_ranks(2, tmp_path, jobs(settings, tmp_path, changes))
    for name in changes:
        out = tmp_path / name
        assert figures(out, "loss") == pytest.approx(figures(tmp_path / "alone", "loss"), rel=1e-5), name
        assert figures(out, "grad_norm") == pytest.approx(figures(tmp_path / "alone", "grad_norm"), rel=2e-4), name
        exported, weights = load_file(out / "model.safetensors"), state(out, 6)
        assert exported.keys() == weights.keys() == state(tmp_path / "alone", 6).keys()
        for key, value in state(tmp_path / "alone", 6).items():
            torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-4, msg=f"{name} {key}")
            assert torch.equal(exported[key], weights[key].bfloat16()), f"{name} {key}"


class Scale(nn.Module):
    """Its weights' gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 7))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.weight * scale).sum() + (self.bias * scale).sum()


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_large_and_many_small_gradients(settings: dict[str, Any], stage: int, precision: str) -> None:
    """Sums in bf16, where 1 + 2**-9 is 1 and seven such micro-batches are lost."""
    from deepspeed.utils import safe_get_full_grad

    changes = {"zero_stage": stage, "precision": precision, "gradient_accumulation": 8}
    config = validate(EagleConfig, {**settings, **changes}, source="test")
    engine.start(config)
    module = Scale()
    made = engine.Engine(module, config)
    scales = [1.0] + [2.0**-9] * 7
    for number, scale in enumerate(scales):
        if number:
            made.step()
        made.backward(made(torch.tensor(scale, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)))
    for parameter in (module.weight, module.bias):
        gradient = safe_get_full_grad(parameter)
        torch.testing.assert_close(
            gradient.float(), torch.full_like(gradient, sum(scales) / 8).float(), rtol=1e-6, atol=0
        )


def test_activation_checkpointing_keeps_less_and_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """An option without effect, or one that computes other gradients the second time."""
    kept, gradients = [], []
    for again in (False, True):
        torch.manual_seed(0)
        head = EagleHead(tiny.tiny_config("llama"))
        if again:
            engine.checkpoint_activations(head)
        inputs = [torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        sizes: list[int] = []

        def keep(value: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(value.numel())
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            output = head(*inputs, torch.arange(40).expand(2, -1)).square().sum()
        output.backward()
        kept.append(sum(sizes))
        gradients.append([parameter.grad for parameter in head.parameters()])
    assert kept[1] < 0.2 * kept[0]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    values = {**settings, "steps": 3}
    for name, on in (("without", False), ("with", True)):
        for stage in (0, 3):
            changes = {"activation_checkpointing": on, "zero_stage": stage, "out": str(tmp_path / f"{name}{stage}")}
            tiny_run.train_here("eagle", {**values, **changes})
    for stage in (0, 3):
        assert figures(tmp_path / f"with{stage}", "loss") == figures(tmp_path / f"without{stage}", "loss")


class HiddenNan(torch.autograd.Function):
    """A finite value with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_nan_reaches_no_state(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, precision: str
) -> None:
    """A step that is skipped in silence for ever, a norm of 1 for one of NaN, or NaN in the newest state."""
    usual, calls = EagleTask.losses, itertools.count(1)
    third = 1 + 2 * settings.get("gradient_accumulation", 1)  # the first micro-batch of the third step

    def losses(self: EagleTask, pairs: Pairs) -> dict[str, torch.Tensor]:
        parts = usual(self, pairs)
        trained = parts["loss"].requires_grad  # and no held-out text
        return {**parts, "loss": HiddenNan.apply(parts["loss"])} if trained and next(calls) == third else parts

    monkeypatch.setattr(EagleTask, "losses", losses)
    changes = {"zero_stage": stage, "precision": precision, "save_every": 1, "eval_every": 100, "heldout_tokens": 20}
    with pytest.raises(loop.TrainingDiverged, match=r"step 3: grad_norm = (nan|inf)"):
        tiny_run.train_here("eagle", {**settings, **changes, "out": str(tmp_path / "run")})
    assert (tmp_path / "run" / "state" / "latest").read_text().strip() == "step-00000002"
    assert all(value.isfinite().all() for value in state(tmp_path / "run", 2).values())


def test_float16_skips_steps_that_overflow(settings: dict[str, Any]) -> None:
    """Catches float16 without a loss scale, at a stage that keeps no float32 masters; and a run that ends where the
    scale is too large at its first step, which DeepSpeed skips."""
    derived = engine.deepspeed_config(tiny_run.read("eagle", {**settings, "precision": "float16"}))
    assert derived["fp16"] == {"enabled": True} and not derived["bf16"]["enabled"]
    assert derived["zero_optimization"]["stage"] == 1
    made = engine.Engine.__new__(engine.Engine)
    made.device, made._stage, made._float16 = torch.device("cpu"), 1, True
    for overflow, expected in ((True, 0.0), (False, 3.0)):
        optimizer = SimpleNamespace(param_groups=[], overflow=overflow)
        norm = math.inf if overflow else 3.0
        made._engine = SimpleNamespace(optimizer=optimizer, step=lambda: None, get_global_grad_norm=lambda n=norm: n)
        assert made.update(0.1).item() == expected
