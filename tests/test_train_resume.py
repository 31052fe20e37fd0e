"""A run that was killed and resumed equals one that was not, bit for bit."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file

from drafters import TargetModel
from train.run_files import TIMED, StateFolder, read_metrics

STEPS = 120


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("resume")
    model = tiny.build("llama")
    model.save_pretrained(path / "target")
    features = tiny_run.write_stores(path / "features", TargetModel(model, name=str(path / "target")))
    changes = {"steps": STEPS, "save_every": 10, "eval_every": 25, "export_every": 25, "gradient_accumulation": 2}
    return tiny_run.settings(str(path / "target"), features, path / "uninterrupted", **changes)


def comparable(out: Path) -> list[dict[str, float]]:
    """All figures but those that measure time."""
    return [{key: value for key, value in row.items() if key not in TIMED} for row in read_metrics(out)]


def kill_when_saved(line: list[str], out: Path, after: str) -> None:
    """Start a run and kill -9 it once a checkpoint later than ``after`` is whole."""
    process = subprocess.Popen(
        line, env=tiny_run.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while (StateFolder(out).latest() or "") <= after and process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint after 200 s"
        time.sleep(0.005)
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(settings: dict[str, Any], tmp_path: Path) -> None:
    """Optimiser state, data position, noise or learning rate lost in a kill; a step logged twice or not at all."""
    tiny_run.train_here("eagle", settings)
    reference, out = Path(settings["out"]), tmp_path / "killed"
    line = tiny_run.command("eagle", tmp_path, {**settings, "out": str(out)})
    kill_when_saved(line, out, after=StateFolder.tag(20))
    killed_at = StateFolder(out).latest()
    assert killed_at is not None
    assert killed_at < StateFolder.tag(STEPS)
    half_written = out / "state" / StateFolder.tag(STEPS + 10)  # what a kill in the middle of a save leaves
    half_written.mkdir()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 119, "lo')
    done = tiny_run.run([*line, "--resume"])
    assert done.returncode == 0, done.stderr
    assert comparable(out) == comparable(reference)
    ours, theirs = load_file(out / "model.safetensors"), load_file(reference / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = sorted(folder.name for folder in (out / "state").glob("step-*") if folder != half_written)
    assert kept == [StateFolder.tag(STEPS - 10), StateFolder.tag(STEPS)]


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"zero_stage": 1}, {"precision": "bf16", "zero_stage": 2}])
def test_resume_is_exact_with_every_optimiser(
    settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Float32 masters rounded to bf16, or a ZeRO partition of another order, on the way through a checkpoint."""
    values = {**settings, **changes, "schedule": "constant", "export_every": 1000}
    tiny_run.train_here("eagle", {**values, "steps": 14, "out": str(tmp_path / "whole")})
    tiny_run.train_here("eagle", {**values, "steps": 7, "out": str(tmp_path / "parts")})
    tiny_run.train_here("eagle", {**values, "steps": 14, "out": str(tmp_path / "parts")}, resume=True)
    whole, parts = ([r for r in comparable(tmp_path / o) if "loss" in r] for o in ("whole", "parts"))
    assert parts == whole
    assert len(whole) == 14


def test_resume_refuses_another_training(settings: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run with another seed or batch, which is neither the old training nor a new one."""
    values = {**settings, "out": str(tmp_path / "run"), "steps": 3}
    tiny_run.train_here("eagle", values)
    with pytest.raises(ValueError, match=r"the config differs .*batch_tokens was 64, is 128"):
        tiny_run.train_here("eagle", {**values, "batch_tokens": 128}, resume=True)
    run = tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True)  # a longer run is the same training
    assert run.progress.step == 5
