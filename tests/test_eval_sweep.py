"""`python -m eval.sweep` from a config file to its pages, on a tiny target."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
from test_eval_prompts import questions

import eval.report.measured
import eval.sweep
from eval.measure.runs import MeasurementError

run = partial(programs.run, eval.sweep.main)


@pytest.fixture
def config(tiny_checkpoint: Callable[..., Path], speed_config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A sweep over max_new_tokens with one drafter."""
    draft = str(tiny_checkpoint("llama", 1))
    drafters = [{"label": "S", "drafter": "speculative", "draft_model": draft, "gamma": 2}]
    keys = {"temperatures": [0.0], "vary": {"max_new_tokens": [3, 6]}}
    return speed_config(questions("a", "b", count=4), {"per_category": 2}, drafters=drafters, **keys)


def test_every_value_has_its_report_and_the_sweep_compares_them(
    config: dict[str, Any], tmp_path: Path, loads: list[str]
) -> None:
    """Catches a value that is not passed on, figures under another value's name, and models loaded for every value."""
    assert run(config) == 0
    assert len(loads) == 2  # the target and the draft model
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [value["value"] for value in found["values"]] == [3, 6]
    for value, tokens in zip(found["values"], (3, 6), strict=True):
        assert value["folder"] == f"max_new_tokens={tokens}"
        report = json.loads((tmp_path / "out" / value["folder"] / "report.json").read_text())
        assert report["environment"]["limits"]["max_new_tokens"] == tokens
        assert [row["drafter"] for row in value["rows"]] == ["autoregressive", "S"]
        for kept, row in zip(value["rows"], report["rows"], strict=True):
            assert kept.items() <= row.items()
        assert value["rows"][0]["speedup"] == 1.0  # over the plain decoding of the same value
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert "| drafter | T | max_new_tokens = 3 | max_new_tokens = 6 |" in page


def test_a_finished_value_is_kept_and_a_changed_one_measured_again(
    config: dict[str, Any], tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches hours measured twice after a stop, and an old report passed off as one of another config or commit."""
    measured: list[str] = []
    plain = eval.report.measured.measure_and_report

    def counted(one: Any, *arguments: Any) -> dict[str, Any]:
        measured.append(one.out.name)
        if fail and one.max_new_tokens == 6:
            raise MeasurementError("out of memory")
        return plain(one, *arguments)

    monkeypatch.setattr("eval.report.series.measure_and_report", counted)
    fail = True
    assert run(config) == 1
    fail = False
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [value["value"] for value in found["values"]] == [3]  # what was measured is there to be read
    assert run(config) == 0
    assert measured == ["max_new_tokens=3", "max_new_tokens=6", "max_new_tokens=6"]
    loads.clear()
    assert run(config) == 0
    assert (len(measured), loads) == (3, [])
    with monkeypatch.context() as patch:
        patch.setattr("drafters.common.machine.code_state", lambda: ("0" * 40, False))
        assert run(config, 'vary={"max_new_tokens": [3]}') == 0
    assert measured[3:] == ["max_new_tokens=3"]
    measured.pop()
    assert run(config, "seed=1", 'vary={"max_new_tokens": [6]}') == 0
    assert measured[3:] == ["max_new_tokens=6"]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"seed": [1, 1]}, "values must be different"),
        ({"out": ["a"]}, "out cannot vary"),
        ({"max_new_token": [1]}, "unknown key 'max_new_token'; did you mean 'max_new_tokens'"),
        ({"seed.x": [1]}, "'seed' holds a value"),
        ({"max_new_tokens": [3, 0]}, "max_new_tokens=0: max_new_tokens: "),
        ({"prompts.file": ["none"]}, "no prompt file at none"),
    ],
)
def test_a_bad_value_is_found_before_anything_is_measured(
    config: dict[str, Any],
    tmp_path: Path,
    loads: list[str],
    capsys: pytest.CaptureFixture[str],
    vary: Any,
    message: str,
) -> None:
    """Catches a sweep that ends at its last value, after hours."""
    assert run(config | {"vary": vary, "seed": 0}) == 1
    assert message in capsys.readouterr().err
    assert not loads
    assert not (tmp_path / "out").exists()
