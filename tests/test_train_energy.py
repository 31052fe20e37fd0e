"""The energy of a training, from counters that the test turns: no machine of the tests has real ones."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from drafters import TargetModel
from drafters.common import energy
from train.run.files import read_metrics
from train.run.loop import TrainRun
from train.watch import energy as watched

JOULES_A_STEP = 20
RANGE = 25  # joules, after which the counter wraps around: within two steps


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", save_every=2)


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's folder, with one CPU package."""
    package = tmp_path / "powercap" / "intel-rapl:0"
    package.mkdir(parents=True)
    for name, value in (("name", "package-0"), ("max_energy_range_uj", RANGE * 10**6), ("energy_uj", 0)):
        (package / name).write_text(f"{value}\n")
    metered = functools.partial(energy.EnergyMeter, powercap=package.parent)
    monkeypatch.setattr(watched, "EnergyMeter", metered)
    monkeypatch.setattr(watched, "EVERY", 0.0)
    return package / "energy_uj"


def turned(counter: Path, before: Callable[[int], None] = lambda step: None) -> Callable[..., None]:
    """A step of the loop that uses energy."""
    real = TrainRun._step

    def step(run: TrainRun, *arguments: Any) -> None:
        before(run.progress.step)
        counter.write_text(str((int(counter.read_text()) + JOULES_A_STEP * 10**6) % (RANGE * 10**6)))
        real(run, *arguments)

    return step


def test_joules_of_a_run_that_was_interrupted(
    settings: dict[str, Any], powercap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a counter that wraps around between two looks, joules of before the kill lost, those of steps that are
    done again counted twice, and a checkpoint that does not tell."""

    def cut(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    whole = TrainRun._step
    monkeypatch.setattr(TrainRun, "_step", turned(powercap, cut))
    with pytest.raises(KeyboardInterrupt):
        tiny_run.train_here("eagle", settings)
    monkeypatch.setattr(TrainRun, "_step", whole)
    monkeypatch.setattr(TrainRun, "_step", turned(powercap))
    tiny_run.train_here("eagle", settings, resume=True)
    out = Path(settings["out"])
    rows = [row["joules"] for row in read_metrics(out) if "seconds" in row]
    assert rows == [0.0, 6 * JOULES_A_STEP]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["joules"] == 6 * JOULES_A_STEP and summary["energy"]["available"]
    assert json.loads((out / "config.json").read_text())["training"]["joules"] == 6 * JOULES_A_STEP
