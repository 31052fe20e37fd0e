"""How training runs end: what they say, what they leave, and what --resume then does."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from data_prep.common import disk
from drafters import TargetModel
from train.core import engine


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(engine, "stop", lambda: None)  # other tests train in this process, too
    return tiny_run.settings(target.name, features, tmp_path / "run")


def train(folder: Path, values: dict[str, Any], *arguments: str) -> int:
    """What ``python train/eagle.py`` does with the command line."""
    return tiny_run.main("eagle", tiny_run.command("eagle", folder, values, *arguments)[2:])


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "limit",
    [
        {"steps": 3},
        {"steps": None, "epochs": 1},
        {"steps": None, "minutes": 1e-9},
        {"steps": None, "minutes": 1e-9, "log_every": 10},  # the last step is not logged
    ],
)
def test_resuming_a_finished_run_changes_nothing(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: dict[str, Any]
) -> None:
    """Catches a --resume in a script that rewrites a finished drafter, or leaves another TensorBoard file each time."""
    values = {**settings, **limit}
    assert train(tmp_path, values) == 0
    first = capsys.readouterr().out
    out = Path(values["out"])
    step = json.loads((out / "config.json").read_text())["training"]["steps"]
    assert step >= 1  # also where `minutes` are too short for one
    assert f"{out} finished at step {step}\nThe drafter: {out}\nMeasure it" in first
    before = files(out)
    assert train(tmp_path, values, "--resume") == 0
    assert files(out) == before
    again = capsys.readouterr().out
    assert again.startswith(f"{out} is already finished at step {step}; nothing was changed. A higher limit")
    assert again.splitlines()[1:] == first.splitlines()[-3:]


def test_what_a_kill_at_the_end_left_undone_is_done(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a run that counts as finished though its last export or its summary is missing."""
    out = Path(settings["out"])
    values = {**settings, "steps": 2}
    assert train(tmp_path, values) == 0
    for name in ("model.safetensors", "summary.json", "config.json"):
        (out / name).unlink()
        assert train(tmp_path, values, "--resume") == 0
        assert (out / name).is_file(), name


def test_a_full_disk_is_refused_at_the_start(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a training that dies of a full disk at its first state, hours after it could have known."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: usage(10**9, 10**9 - 50_000, 50_000))
    with pytest.raises(ValueError, match=r"the run folder .*run .*needs .* [kM]B, and 50\.0 kB are free at .*another"):
        train(tmp_path, settings)
    assert not Path(settings["out"]).exists()


def test_batches_smaller_than_a_dialogue_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches batch_tokens that every step silently exceeds."""
    longest = max(tiny_run.LENGTHS["train"])
    for wrong in (1, longest - 1):
        with pytest.raises(ValueError, match=rf"batch_tokens is {wrong}, .* longest .* {longest} tokens; set"):
            train(tmp_path, {**settings, "batch_tokens": wrong})
    assert not Path(settings["out"]).exists()
    assert train(tmp_path, {**settings, "batch_tokens": longest, "steps": 1}) == 0
