"""--overfit: a sound pipeline passes; a broken mask, broken features and a broken alignment are each found."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from data_prep.store.reader import FeatureStore
from drafters import TargetModel
from drafters.config import validate
from train.core import engine
from train.core import task as tasks
from train.eagle import EagleConfig, EagleTask
from train.preflight.overfit import Finding, clear, overfit_config, run_overfit
from train.run.inputs import open_inputs

STEPS = 400
BLOCKS = {"tap_layers": [tiny_run.TAP], "block_size": 4, "mask_token_id": 2, "layers": 1}


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", exit_layer=tiny_run.TAP, learning_rate=0.003)


def found(settings: dict[str, Any], kind: str, steps: int = STEPS) -> list[Finding]:
    values = {key: value for key, value in settings.items() if kind == "kangaroo" or key != "exit_layer"}
    values |= {"heads": 2, "own_lm_heads": True} if kind == "medusa" else {}  # enough weights to learn it by heart
    values |= BLOCKS if kind in BLOCKED else {}
    values |= {"layers": 2} if kind == "dflash" else {}  # one layer learns half of it, in any number of steps
    config = overfit_config(tiny_run.read(kind, {**values, "log_every": max(1, steps // 12)}), steps)
    inputs = open_inputs(config)
    return run_overfit(config, inputs, engine.start(config), 4)


def sound(findings: list[Finding]) -> list[bool]:
    return [finding.sound for finding in findings]


BLOCKED = ("dflash", "dspark")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa", *(pytest.param(name, marks=pytest.mark.long) for name in BLOCKED)])
def test_a_sound_pipeline_passes(settings: dict[str, Any], kind: str) -> None:
    """A threshold that a right pipeline misses, as DSpark's with its total variation, or answers that are judged from
    anchors that no loss trains; files in the folder of the real run. Kangaroo's is that of ``test_the_command``."""
    findings = found(settings, kind)
    assert sound(findings) == [True] * 3, [finding.text() for finding in findings]
    assert not Path(settings["out"]).exists()
    assert Path(settings["out"] + "-overfit", "summary.json").is_file()


@pytest.mark.slow
def test_a_mask_that_is_off_by_one_fails(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of every answer left untrained, as with the unshifted mask of the released code."""

    def late(self: EagleTask, batch: Any, seed: int | None = None) -> torch.Tensor:
        trained = batch.shifted(batch.loss_mask, 2)
        first = trained & ~torch.roll(trained, 1, dims=1)
        return (trained & ~first).flatten().nonzero().squeeze(1)

    monkeypatch.setattr(EagleTask, "rows", late)
    findings = found(settings, "eagle")
    assert sound(findings) == [True, True, False], [finding.text() for finding in findings]
    assert "the loss mask or its shift" in findings[2].look_at


@pytest.mark.slow
def test_a_target_that_is_off_by_one_fails(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that falls to nothing for the wrong tokens: feature_{i+2} learnt where feature_{i+1} is drafted."""
    monkeypatch.setattr(tasks, "target_states", lambda batch, ahead: torch.roll(batch.features, -2, dims=1))
    findings = found(settings, "eagle")
    assert sound(findings)[2] is False, [finding.text() for finding in findings]
    assert "alignment" in findings[2].look_at


def test_shuffled_features_fail(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Features at other tokens than they were computed for: a head learns even those by heart."""
    read = FeatureStore.__getitem__

    def shuffled(self: FeatureStore, index: int) -> Any:
        item = read(self, index)
        order = torch.randperm(len(item.features), generator=torch.Generator().manual_seed(index))
        return dataclasses.replace(item, features=item.features[order])

    monkeypatch.setattr(FeatureStore, "__getitem__", shuffled)
    findings = found(settings, "eagle", steps=4)
    assert sound(findings) == [False]  # and no training on them
    assert "data_prep.features" in findings[0].look_at


@pytest.mark.slow
def test_the_command(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit status that says nothing; the real run's folder touched; another's files deleted."""
    monkeypatch.setattr(engine, "stop", lambda: None)  # other tests train in this process, too
    line = tiny_run.command("kangaroo", tmp_path, settings, "--overfit", "3", f"steps={STEPS}", "log_every=50")
    assert tiny_run.main("kangaroo", line[2:]) == 0
    assert "sound: the drafter learns these dialogues" in capsys.readouterr().out
    out = Path(settings["out"] + "-overfit")
    assert [finding["sound"] for finding in json.loads((out / "overfit.json").read_text())] == [True] * 3
    assert not Path(settings["out"]).exists()
    clear(out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no overfit run"):
        clear(out)


def test_more_dialogues_than_there_are(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a mistyped number that trains on all dialogues without a word."""
    line = tiny_run.command("kangaroo", tmp_path, settings, "--overfit", "1000000000")
    with pytest.raises(ValueError, match=r"--overfit 1,000,000,000: .*features has 14 dialogues; give .* --overfit 8"):
        tiny_run.main("kangaroo", line[2:])


def test_what_an_overfit_run_changes(settings: dict[str, Any]) -> None:
    """Noise, a decaying rate or a warm-up longer than the run, which all keep a right pipeline from passing."""
    values = {key: value for key, value in settings.items() if key != "exit_layer"}
    config = validate(EagleConfig, {**values, "warmup_steps": 2000, "learning_rate": 3e-5, "epochs": 9}, source="test")
    changed = overfit_config(config, 400)
    assert isinstance(changed, EagleConfig)
    assert (changed.noise, changed.schedule, changed.warmup_steps, changed.epochs) == ("none", "constant", 40, None)
    assert (changed.learning_rate, changed.steps) == (3e-4, 400)
    assert changed.out.name == "run-overfit"
