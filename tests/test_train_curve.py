"""tau against minutes of training: points of runs, lines through them, and what is no run."""

import json
from pathlib import Path
from typing import Any

import pytest

from train.run.curve import Line, by_method, expected, fitted, points_of
from train.tools import curve as program


def run_of(folder: Path, method: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"drafter_type": method}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 9')
    return folder


def test_points_and_the_line_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a measurement before the first step, minutes of another one, an estimate beside measurements, and a line
    over minutes instead of their logarithm."""
    first = {"step": 0, "heldout_tau": 1.0, "seconds": 0.0}
    runs = []
    for minutes, tau in ((4, 2.5), (1, 1.5), (2, 2.0)):
        rows = [first, {"step": 3, "loss": 1.0, "tokens": minutes * 1000}]
        rows += [{"step": 3, "heldout_0-alpha": 0.5, "seconds": 60.0 * minutes}, {"step": 3, "heldout_tau": tau}]
        runs.append(run_of(tmp_path / f"{minutes}", "eagle", rows))
    estimated = [{"step": 3, "tokens": 500, "heldout_slot_1_top1": 0.5, "heldout_slot_2_top1": 0.25, "seconds": 30.0}]
    runs.append(run_of(tmp_path / "block", "dflash", [first | {"heldout_tau": None}, *estimated]))
    curves = by_method(runs)
    assert [tuple(point) for point in curves["eagle"]] == [
        (1, 1000, 1.5, True),
        (2, 2000, 2.0, True),
        (4, 4000, 2.5, True),
    ]
    assert [tuple(point) for point in curves["dflash"]] == [(0.5, 500, 1.625, False)]
    line = fitted(curves["eagle"])
    assert isinstance(line, Line) and line.at_one == pytest.approx(1.5) and line.doubling == pytest.approx(0.5)
    assert line.error == pytest.approx(0) and line.at(8) == pytest.approx(3.0) and fitted(curves["dflash"]) is None
    program.main([*map(str, runs), "--out", str(tmp_path / "curve.json")])
    shown = capsys.readouterr().out
    assert (
        "tau +0.50 per doubling (off by 0.00 in the mean); extrapolated: 3.00 after 8 minutes, 3.50 after 16" in shown
    )
    assert "tau 1.62 (estimated from held-out acceptance)" in shown and "no line: it needs three points" in shown
    assert json.loads((tmp_path / "curve.json").read_text())["curves"]["eagle"]["line"]["doubling"] == pytest.approx(
        0.5
    )


def test_acceptance_of_each_method() -> None:
    """Catches a product that goes on behind a missing step, and steps that are counted from another number."""
    assert expected({"heldout_0-alpha": 0.5, "heldout_1-alpha": 0.5, "heldout_3-alpha": 0.5}) == 1.75
    assert expected({"heldout_step_0_top1": 0.5}) == 1.5 and expected({"heldout_head_1_top1": 0.25}) == 1.25
    assert expected({"heldout_loss": 1.0}) is None


def test_what_is_no_run(tmp_path: Path) -> None:
    """Catches a traceback for a folder without figures, and a curve without points."""
    with pytest.raises(ValueError, match="there is no folder .*none; give the `out`"):
        program.main([str(tmp_path / "none")])
    with pytest.raises(ValueError, match="has no metrics.jsonl; give run folders"):
        points_of(tmp_path)
    with pytest.raises(ValueError, match="has neither heldout_tau nor acceptance in metrics.jsonl"):
        points_of(run_of(tmp_path / "a", "eagle", [{"step": 1, "loss": 2.0}]))
