"""Checkpoints of a target's training run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from drafters.common.files import save_tensors

if TYPE_CHECKING:
    from train.target.model import Optimizer


def replace_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary folder, then replace `folder` by it."""
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@dataclasses.dataclass
class DataPosition:
    """The run's position in its data, whose order depends only on the seed and the epoch."""

    epoch: int = 0
    cursor: int = 0


@dataclasses.dataclass
class TargetProgress:
    """The part of a checkpoint beside tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    position: DataPosition = dataclasses.field(default_factory=DataPosition)


def save_target_state(run_dir: Path, optimizer: Optimizer, progress: TargetProgress) -> None:
    """Write `checkpoint-<step>` under a temporary name, rename it, then remove the older ones."""

    def write(folder: Path) -> None:
        save_tensors({n: p.detach() for n, p in optimizer.master.items()}, folder / "model.safetensors")
        torch.save([part.state_dict() for part in optimizer.parts], folder / "optimizer.pt")
        (folder / "progress.json").write_text(json.dumps(dataclasses.asdict(progress)))

    older = checkpoints(run_dir)
    target = run_dir / f"checkpoint-{progress.step:08d}"
    if target in older:  # the same state; replacing it would risk losing it
        return
    replace_folder(target, write)
    for folder in older:
        shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; incomplete ones have a temporary name."""
    return sorted(p for p in run_dir.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit())


def load_target_state(run_dir: Path, optimizer: Optimizer) -> TargetProgress:
    """Restore the newest checkpoint into `optimizer` and its model."""
    found = checkpoints(run_dir)
    if not found:
        raise ValueError(f"--resume: no checkpoint in {run_dir}; start without --resume")
    weights = load_file(found[-1] / "model.safetensors")
    shapes = {name: parameter.shape for name, parameter in optimizer.master.items()}
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise ValueError(f"{found[-1]} holds a model of another shape than the config's")
    with torch.no_grad():
        for name, parameter in optimizer.master.items():
            parameter.copy_(weights[name])
    states = torch.load(found[-1] / "optimizer.pt", weights_only=True)
    if len(states) != len(optimizer.parts):
        raise ValueError(f"{found[-1]} was written with threads={len(states) - 1}; resume with the same number")
    for part, state in zip(optimizer.parts, states, strict=True):
        part.load_state_dict(state)
    optimizer.publish()
    raw = json.loads((found[-1] / "progress.json").read_text())
    return TargetProgress(**{**raw, "position": DataPosition(**raw["position"])})
